// Tests real `kvferry controller` processes that are killed, with real clients that go on.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <random>
#include <set>

#include "tests/controller/live.h"

namespace kvferry::controller {
namespace {

/// A `kvferry controller` process. It ends with this object.
class Process {
 public:
  explicit Process(std::vector<std::string> args) {
    int out[2];
    if (::pipe(out) != 0) throw std::runtime_error("no pipe left");
    args.insert(args.begin(), {KVFERRY_BINARY, "controller"});
    std::vector<char*> argv;
    for (std::string& arg : args) argv.push_back(arg.data());
    argv.push_back(nullptr);
    id_ = ::fork();
    if (id_ == 0) {
      ::dup2(out[1], STDOUT_FILENO);
      ::setenv("KVFERRY_LOG", "off", 1);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
    ::close(out[1]);
    std::string line;
    for (char c = 0; ::read(out[0], &c, 1) == 1 && c != '\n';) line += c;
    ::close(out[0]);
    endpoint_ = line.substr(line.rfind(' ') + 1);
  }
  ~Process() { end(SIGKILL); }
  void end(int signal) {
    if (id_ <= 0) return;
    ::kill(id_, signal);
    ::waitpid(id_, nullptr, 0);
    id_ = 0;
  }
  const std::string& endpoint() const { return endpoint_; }

 private:
  pid_t id_ = 0;
  std::string endpoint_;
};

class RecoveryTest : public ::testing::Test {
 protected:
  RecoveryTest() : folder_(std::filesystem::temp_directory_path() / fmt::format("kvferry-recovery-{}", ::getpid())) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directory(folder_);
  }
  ~RecoveryTest() override { std::filesystem::remove_all(folder_); }
  std::unique_ptr<Process> start() const {
    return std::make_unique<Process>(std::vector<std::string>{"--bind", "ipc://" + (folder_ / "socket").string(),
                                                              "--state", (folder_ / "state").string()});
  }

  std::filesystem::path folder_;
};

TEST_F(RecoveryTest, NothingAcknowledgedIsLostHoweverOftenItIsKilled) {
  std::unique_ptr<Process> controller = start();
  const std::string endpoint = controller->endpoint();
  LiveNode asker(endpoint, node_info("asker"));
  ASSERT_TRUE(asker.wait_for<Registered>());
  auto worker = std::make_unique<LiveNode>(endpoint, node_info("worker"));
  ASSERT_TRUE(worker->wait_until([&] { return worker->client().registered() && worker->count<SnapshotWanted>() > 0; }));

  std::mt19937 random(7);
  constexpr std::uint32_t kKeysPerMessage = 50;
  // the worker has published keys [0, num_published) and evicted the keys of every third message again
  std::uint32_t num_published = 0;
  for (int life = 0; life < 4; ++life) {
    // Maps the sequence number of each message to what is true after the message.
    std::map<std::uint64_t, std::uint32_t> published;
    std::map<std::uint64_t, std::uint32_t> evicted;  // first key of each eviction
    const TimeNs end = steady_clock().now() + (300 + random() % 700) * kMillisecond;
    while (steady_clock().now() < end) {
      published[worker->client().next_sequence()] = num_published;
      worker->client().publish(full_chunks(num_published, num_published + kKeysPerMessage));
      if (num_published / kKeysPerMessage % 3 == 2) {
        evicted[worker->client().next_sequence()] = num_published;
        worker->client().evict(keys_of(num_published, num_published + kKeysPerMessage));
      }
      num_published += kKeysPerMessage;
      worker->turn(1);
    }
    controller->end(SIGKILL);
    const std::uint64_t kept_below = worker->client().kept_below();
    worker.reset();  // the worker dies too, so that it can't publish its chunks again

    controller = start();
    ASSERT_TRUE(asker.wait_until([&] { return asker.count<Registered>() >= static_cast<std::size_t>(life + 2); }));
    std::set<std::uint32_t> gone;
    for (const auto& [sequence, key] : evicted) {
      if (sequence < kept_below) gone.insert(key);
    }
    std::size_t num_checked = 0;
    for (const auto& [sequence, key] : published) {
      if (sequence >= kept_below) continue;
      const bool may_be_gone = evicted.contains(sequence + 1);
      const std::vector<std::string> holders = asker.who_has(ask_for(key, key + kKeysPerMessage));
      if (gone.contains(key)) {
        ASSERT_TRUE(holders.empty()) << "evicted with number " << sequence + 1 << " of " << kept_below;
      } else if (!may_be_gone) {
        ASSERT_EQ(holders, std::vector<std::string>{fmt::format("worker:{}", kKeysPerMessage)})
            << "published with number " << sequence << " of " << kept_below;
      }
      ++num_checked;
    }
    ASSERT_GT(num_checked, 10U) << "life " << life << " kept below " << kept_below;
    const Status status = fetch_status(endpoint, kDeadlineMs).value();
    ASSERT_TRUE(status.state.durable);
    ASSERT_GT(status.state.records_loaded, 0U);

    // A newer incarnation, which publishes everything again.
    worker = std::make_unique<LiveNode>(endpoint, node_info("worker", static_cast<std::uint64_t>(life) + 2));
    ASSERT_TRUE(worker->wait_for<SnapshotWanted>());
  }
}

TEST_F(RecoveryTest, AWorkerThatGoesOnIsNotAskedForEverything) {
  std::unique_ptr<Process> controller = start();
  const std::string endpoint = controller->endpoint();
  LiveNode worker(endpoint, node_info("worker")), asker(endpoint, node_info("asker"));
  ASSERT_TRUE(worker.wait_for<SnapshotWanted>());
  worker.hold(full_chunks(0, 100));
  ASSERT_TRUE(worker.wait_until([&] { return worker.client().kept_below() == worker.client().next_sequence(); }));
  controller->end(SIGKILL);
  worker.hold(full_chunks(100, 200));  // while no controller listens
  controller = start();
  ASSERT_TRUE(worker.wait_for<Registered>(2));
  ASSERT_TRUE(asker.wait_until([&] {
    worker.turn(1);
    return asker.who_has(ask_for(0, 200)) == std::vector<std::string>{"worker:200"} &&
           asker.last<LookupReply>().holders[0].confirmed;
  }));
  EXPECT_EQ(worker.count<SnapshotWanted>(), 1U);
}

TEST_F(RecoveryTest, WhoDoesNotComeBackIsGoneWithinTheLease) {
  std::unique_ptr<Process> controller = start();
  const std::string endpoint = controller->endpoint();
  {
    LiveNode worker(endpoint, node_info("worker"));
    ASSERT_TRUE(worker.wait_for<SnapshotWanted>());
    worker.hold(full_chunks(0, 100));
    ASSERT_TRUE(worker.wait_until([&] { return worker.client().kept_below() == worker.client().next_sequence(); }));
    controller->end(SIGKILL);
  }
  controller = start();
  const TimeNs began = steady_clock().now();
  LiveNode asker(endpoint, node_info("asker"));
  EXPECT_TRUE(asker.wait_to_see(ask_for(0, 100), {"worker:100"}));
  EXPECT_FALSE(asker.last<LookupReply>().holders.at(0).confirmed);
  EXPECT_TRUE(asker.wait_to_see(ask_for(0, 100), {}));
  EXPECT_GT(steady_clock().now() - began, 2 * kSecond);
  EXPECT_LT(steady_clock().now() - began, 10 * kSecond);
}

}  // namespace
}  // namespace kvferry::controller
