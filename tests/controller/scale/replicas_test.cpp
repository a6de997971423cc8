// Tests several real `kvferry controller` processes with a real etcd and a real Redis. Any of them may die.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "tests/controller/live.h"
#include "tests/controller/scale/services.h"

namespace kvferry::controller::scale {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// limit on the wait for a dead replica's lease, which is 5 s; much longer, because the machine may be busy
constexpr std::chrono::seconds kLeaseOver{60};

/// A `kvferry controller` process on a port of its own.
class ControllerProcess {
 public:
  ControllerProcess(const std::string& name, int port, const std::vector<std::string>& more)
      : endpoint_("tcp://127.0.0.1:" + std::to_string(port)), process_(command(name, endpoint_, more), port) {
    process_.start();
  }
  const std::string& endpoint() const { return endpoint_; }
  Service& process() { return process_; }
  ScaleStatus status() const { return fetch_status(endpoint_, kDeadlineMs).value().scale; }
  std::vector<std::string> replicas() const {
    std::vector<std::string> names;
    for (const ReplicaStatus& replica : status().replicas) names.push_back(replica.name);
    return names;
  }

 private:
  static std::vector<std::string> command(const std::string& name, const std::string& endpoint,
                                          const std::vector<std::string>& more) {
    std::vector<std::string> words = {KVFERRY_BINARY, "controller", "--bind", endpoint, "--replica", name};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  std::string endpoint_;
  Service process_;
};

/// A node that reports to all replicas what it holds, and looks up chunks at any of them.
class Worker {
 public:
  explicit Worker(NodeInfo info) : info_(std::move(info)) {
    static int num_made = 0;
    // the same for all links of this worker, because they belong to one process
    info_.secret = fmt::format("worker {}", ++num_made);
  }
  void follow(const std::string& endpoint) {
    links_[endpoint] = std::make_unique<LiveNode>(endpoint, info_);
    links_[endpoint]->hold(held_);
  }
  LiveNode& at(const std::string& endpoint) { return *links_.at(endpoint); }
  void hold(const std::vector<ChunkEntry>& chunks) {
    held_.insert(held_.end(), chunks.begin(), chunks.end());
    for (auto& [endpoint, link] : links_) link->hold(chunks);
  }
  void turn() {
    for (auto& [endpoint, link] : links_) link->turn(0);
  }

 private:
  NodeInfo info_;
  std::vector<ChunkEntry> held_;
  std::map<std::string, std::unique_ptr<LiveNode>> links_;
};

class Replicas : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!EtcdService::is_here()) GTEST_SKIP() << "etcd is not installed (Debian's etcd-server)";
    if (!RedisService::is_here()) GTEST_SKIP() << "redis-server is not installed (Debian's redis-server)";
    etcd = std::make_unique<EtcdService>();
    redis = std::make_unique<RedisService>();
  }
  void start(std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) start_one();
    for (const auto& replica : replicas)
      ASSERT_TRUE(wait_until([&] { return replica->replicas().size() == replicas.size(); }));
  }
  ControllerProcess& start_one() {
    replicas.push_back(std::make_unique<ControllerProcess>(
        "r" + std::to_string(replicas.size()), free_port(),
        std::vector<std::string>{"--etcd", etcd->url(), "--event-log", redis->url()}));
    return *replicas.back();
  }
  void follow_all(Worker& worker) {
    for (const auto& replica : replicas) worker.follow(replica->endpoint());
  }
  /// Runs the loops of all workers until `reached` returns true.
  bool wait(const std::function<bool()>& reached, std::chrono::milliseconds limit = kServiceDeadline) {
    return wait_until(
        [&] {
          for (Worker* worker : workers) worker->turn();
          return reached();
        },
        limit);
  }
  /// Returns the answer that `worker` gets at `endpoint`. Meanwhile the loops of the other workers go on.
  std::vector<std::string> ask(Worker& worker, const std::string& endpoint, const LookupQuery& query) {
    LiveNode& link = worker.at(endpoint);
    if (!link.client().registered()) return {"not registered"};
    const Result<std::uint64_t> token = link.client().lookup(query);
    if (!token) return {token.error().what};
    const std::size_t num = link.count<LookupReply>();
    if (!wait([&] { return link.count<LookupReply>() > num; }, std::chrono::seconds(5))) return {"no reply"};
    std::vector<std::string> names;
    for (const Holder& holder : link.last<LookupReply>().holders)
      names.push_back(fmt::format("{}:{}", holder.engine_id, holder.num_full_chunks));
    return names;
  }
  bool sees(Worker& worker, const std::string& endpoint, const LookupQuery& query,
            const std::vector<std::string>& expected) {
    return wait([&] { return ask(worker, endpoint, query) == expected; });
  }

  std::unique_ptr<EtcdService> etcd;
  std::unique_ptr<RedisService> redis;
  std::vector<std::unique_ptr<ControllerProcess>> replicas;
  std::vector<Worker*> workers;
};

TEST_F(Replicas, AnyMayBeKilledAndTheOthersAnswer) {
  start(3);
  Worker a(node_info("a")), b(node_info("b"));
  workers = {&a, &b};
  follow_all(a);
  follow_all(b);
  b.hold(full_chunks(0, 5));
  for (const auto& replica : replicas) ASSERT_TRUE(sees(a, replica->endpoint(), ask_for(0, 5), {"b:5"}));
  for (std::uint32_t i = 0; i < 3; ++i) {
    replicas[i]->process().kill();
    b.hold(full_chunks(5 + i, 6 + i));
    const std::vector<std::string> all = {fmt::format("b:{}", 6 + i)};
    for (std::uint32_t other = 0; other < 3; ++other) {
      if (other == i) continue;
      EXPECT_THAT(ask(a, replicas[other]->endpoint(), ask_for(0, 1)), ElementsAre("b:1")) << "at once";
      EXPECT_TRUE(sees(a, replicas[other]->endpoint(), ask_for(0, 6 + i), all));
    }
    const std::uint32_t other = (i + 1) % 3;
    EXPECT_TRUE(wait([&] { return replicas[other]->replicas().size() == 2; }, kLeaseOver));
    EXPECT_TRUE(
        wait([&] { return replicas[other]->status().log_writer || replicas[3 - i - other]->status().log_writer; },
             kLeaseOver));
    replicas[i]->process().start();
    EXPECT_TRUE(sees(a, replicas[i]->endpoint(), ask_for(0, 6 + i), all)) << "a replica that came back";
    EXPECT_TRUE(wait([&] { return replicas[other]->replicas().size() == 3; }));
  }
}

TEST_F(Replicas, WithoutEtcdAndRedisAllGoesOnAndIsTrueAfterwards) {
  start(2);
  Worker a(node_info("a")), b(node_info("b"));
  workers = {&a, &b};
  follow_all(a);
  follow_all(b);
  b.hold(full_chunks(0, 5));
  for (const auto& replica : replicas) ASSERT_TRUE(sees(a, replica->endpoint(), ask_for(0, 5), {"b:5"}));
  etcd->process().kill();
  redis->process().kill();
  for (const auto& replica : replicas) {
    EXPECT_TRUE(wait([&] { return !replica->status().etcd_ok && !replica->status().log_ok; }));
    EXPECT_THAT(replica->replicas(), ElementsAre("r0", "r1"));
  }
  b.hold(full_chunks(5, 8));
  Worker newer(node_info("c", 9));  // this worker registers only at the first replica
  newer.follow(replicas[0]->endpoint());
  workers = {&a, &b, &newer};
  newer.hold(full_chunks(20, 22));
  for (const auto& replica : replicas) EXPECT_TRUE(sees(a, replica->endpoint(), ask_for(0, 8), {"b:8"}));
  EXPECT_TRUE(sees(a, replicas[0]->endpoint(), ask_for(20, 22), {"c:2"}));
  Worker older(node_info("c", 8));
  older.follow(replicas[1]->endpoint());
  workers.push_back(&older);
  EXPECT_TRUE(wait([&] { return older.at(replicas[1]->endpoint()).count<Registered>() == 1; }))
      << "nobody knows better";
  etcd->process().start();
  redis->process().start();
  for (const auto& replica : replicas)
    EXPECT_TRUE(wait([&] { return replica->status().etcd_ok && replica->status().log_ok; }));
  EXPECT_TRUE(wait([&] { return older.at(replicas[1]->endpoint()).count<Refused>() == 1; }));
  EXPECT_TRUE(sees(a, replicas[1]->endpoint(), ask_for(20, 22), {}));
}

TEST_F(Replicas, NoLookupWaitsForTheTimeoutsOfAStoppedEtcdOrRedis) {
  start(2);
  Worker a(node_info("a")), b(node_info("b"));
  workers = {&a, &b};
  follow_all(a);
  follow_all(b);
  b.hold(full_chunks(0, 5));
  for (const auto& replica : replicas) ASSERT_TRUE(sees(a, replica->endpoint(), ask_for(0, 5), {"b:5"}));
  etcd->process().stop();
  redis->process().stop();
  std::vector<std::chrono::steady_clock::duration> took;
  for (int i = 0; i < 80; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_THAT(ask(a, replicas[static_cast<std::size_t>(i) % 2]->endpoint(), ask_for(0, 5)), ElementsAre("b:5"));
    took.push_back(std::chrono::steady_clock::now() - begin);
    b.hold(full_chunks(100, 200));
    wait([] { return false; }, std::chrono::milliseconds(100));
  }
  std::sort(took.begin(), took.end());
  EXPECT_LT(took.back(), std::chrono::seconds(2)) << "their time-outs are as long";
  EXPECT_LT(took[took.size() / 2], std::chrono::milliseconds(200)) << "half of the lookups wait for nothing else, too";
  EXPECT_FALSE(replicas[0]->status().etcd_ok);
  etcd->process().go_on();
  redis->process().go_on();
  EXPECT_TRUE(wait([&] { return replicas[0]->status().etcd_ok && replicas[0]->status().log_ok; }));
}

TEST_F(Replicas, ALateReplicaServesWhatTheLogHasBeforeWorkersTellIt) {
  start(1);
  const std::string first = replicas[0]->endpoint();
  Worker a(node_info("a")), b(node_info("b"));
  workers = {&a, &b};
  a.follow(first);
  b.follow(first);
  b.hold(full_chunks(0, 1000));
  ASSERT_TRUE(sees(a, first, ask_for(0, 1000), {"b:1000"}));
  ASSERT_TRUE(wait([&] { return replicas[0]->status().log_lag_bytes == 0; }));
  const std::string late = start_one().endpoint();
  a.follow(late);
  std::uint32_t num_more = 1000;
  const auto sees_b = [&] {
    b.hold(full_chunks(num_more, num_more + 1));  // b does not know that this replica was started later
    ++num_more;
    const std::vector<std::string> answer = ask(a, late, ask_for(0, 1000));
    return answer == std::vector<std::string>{"b:1000"};
  };
  ASSERT_TRUE(wait(sees_b));
  EXPECT_FALSE(a.at(late).last<LookupReply>().holders[0].confirmed) << "hearsay";
  EXPECT_EQ(fetch_status(late, kDeadlineMs).value().counters.nodes_registered, 1U) << "a alone";
  b.follow(late);
  EXPECT_TRUE(wait([&] {
    return ask(a, late, ask_for(0, 1000)) == std::vector<std::string>{"b:1000"} &&
           a.at(late).last<LookupReply>().holders[0].confirmed;
  })) << "its own word";
}

TEST_F(Replicas, ANodeOfTheLogThatDoesNotComeIsDropped) {
  start(1);
  const std::string first = replicas[0]->endpoint();
  Worker a(node_info("a"));
  workers = {&a};
  {
    Worker b(node_info("b"));
    b.follow(first);
    a.follow(first);
    workers = {&a, &b};
    b.hold(full_chunks(0, 10));
    ASSERT_TRUE(sees(a, first, ask_for(0, 10), {"b:10"}));
    ASSERT_TRUE(wait([&] { return replicas[0]->status().log_lag_bytes == 0; }));
    workers = {&a};
    replicas[0]->process().kill();  // so no replica records that b has left
  }
  const std::string late = start_one().endpoint();
  a.follow(late);
  EXPECT_TRUE(wait([&] { return fetch_status(late, kDeadlineMs).value().scale.log_read > 0; }));
  EXPECT_TRUE(wait([&] { return fetch_status(late, kDeadlineMs).value().counters.nodes_expired >= 1; }));
  EXPECT_TRUE(sees(a, late, ask_for(0, 10), {}));
}

TEST_F(Replicas, AnOlderIncarnationIsRefusedEverywhere) {
  start(3);
  Worker a(node_info("a")), older(node_info("e", 5)), newer(node_info("e", 6)), again(node_info("e", 5));
  workers = {&a, &older};
  follow_all(a);
  older.follow(replicas[1]->endpoint());
  older.hold(full_chunks(0, 4));
  ASSERT_TRUE(sees(a, replicas[1]->endpoint(), ask_for(0, 4), {"e:4"}));
  newer.follow(replicas[0]->endpoint());
  workers = {&a, &older, &newer};
  ASSERT_TRUE(wait([&] { return newer.at(replicas[0]->endpoint()).count<Registered>() == 1; }));
  EXPECT_TRUE(wait([&] { return older.at(replicas[1]->endpoint()).count<Refused>() == 1; }));
  EXPECT_THAT(older.at(replicas[1]->endpoint()).last<Refused>().reason, HasSubstr("newer incarnation 6"));
  EXPECT_THAT(ask(a, replicas[1]->endpoint(), ask_for(0, 4)), IsEmpty());
  const std::string late = start_one().endpoint();
  ASSERT_TRUE(wait([&] { return replicas[3]->replicas().size() == 4; }));
  follow_all(again);
  workers = {&a, &newer, &again};
  for (const auto& replica : replicas)
    EXPECT_TRUE(wait([&] { return again.at(replica->endpoint()).count<Refused>() == 1; })) << replica->endpoint();
}

TEST_F(Replicas, AQuotaHoldsAtAllReplicasAlsoAtOneThatBeginsLater) {
  start(2);
  ASSERT_EQ(
      ::system((KVFERRY_BINARY " quota 3 --namespace fleet --controller " + replicas[0]->endpoint() + " >/dev/null")
                   .c_str()),
      0);
  start_one();
  for (const auto& replica : replicas)
    ASSERT_TRUE(wait_until([&] { return replica->status().etcd_ok && replica->replicas().size() == 3; }));
  Worker a(node_info("a", 1, "fleet")), b(node_info("b", 1, "fleet"));
  workers = {&a, &b};
  follow_all(a);
  follow_all(b);
  b.hold(full_chunks(0, 5));
  for (const auto& replica : replicas) {
    const auto num_kept = [&] {
      const std::vector<NodeStatus> nodes = fetch_status(replica->endpoint(), kDeadlineMs).value().nodes;
      return nodes.size() == 2 ? nodes[1].num_chunks : 0;
    };
    EXPECT_TRUE(wait([&] { return num_kept() > 0; }));
    wait([] { return false; }, std::chrono::milliseconds(300));
    EXPECT_EQ(num_kept(), 3U) << "of 5";
  }
}

TEST_F(Replicas, StatusTellsPeopleAndMachines) {
  start(2);
  const auto output_of = [](const std::string& arguments) {
    std::string output;
    std::FILE* pipe = ::popen((KVFERRY_BINARY " status " + arguments).c_str(), "r");
    for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) output += static_cast<char>(c);
    EXPECT_EQ(::pclose(pipe), 0);
    return output;
  };
  ASSERT_TRUE(wait_until([&] { return replicas[1]->status().log_ok && !replicas[1]->status().log_writer; }));
  const std::string table = output_of("--controller " + replicas[1]->endpoint());
  EXPECT_THAT(table, HasSubstr("replica r1, others: r0\n"));
  EXPECT_THAT(table, ::testing::ContainsRegex("etcd 127.0.0.1:[0-9]+: ok\n"));
  EXPECT_THAT(table, ::testing::ContainsRegex(
                         "event log 127.0.0.1:[0-9]+: ok, written by another replica; 0 bytes not confirmed yet"));
  const std::string json = output_of("--json --controller " + replicas[0]->endpoint());
  EXPECT_THAT(json, HasSubstr("\"etcd_ok\": true"));
  EXPECT_THAT(json, HasSubstr("\"log_writer\": true"));
}

}  // namespace
}  // namespace kvferry::controller::scale
