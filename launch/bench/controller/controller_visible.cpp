#include <poll.h>

#include <thread>

#include "controller/api/client.h"
#include "launch/bench/controller/controller_nodes.h"
#include "launch/bench/controller/controller_steps.h"

namespace kvferry::bench {
namespace {

constexpr int kPatienceMs = 10'000;
constexpr TimeNs kTurn = kMillisecond;
constexpr std::uint64_t kBatchesPerTurn = 32;       // with kBatchKeys keys each: a million hashes a second
constexpr std::uint64_t kTurns = 4000;              // publishing and evicting turns together
constexpr std::uint64_t kFirstPrefix = 1ULL << 40;  // these prefixes are held by no other node

Error no_answer() { return {ErrorCode::kUnavailable, "the benchmark's controller does not answer"}; }

class Node {
 public:
  static Result<Node> make(const std::string& controller, const std::string& name) {
    Result<std::unique_ptr<controller::Client>> client =
        controller::make_client({.controller = controller, .node = node_info(name)});
    if (!client) return std::move(client).error();
    const SteadyClock clock;
    if (Result<void> up = controller::wait_registered(**client, clock, kPatienceMs); !up) return std::move(up).error();
    return Node(*std::move(client));
  }
  controller::Client& client() { return *client_; }

  /// Repeats a lookup until it finds the key.
  Result<void> wait_for(const ChunkKey& key) {
    const TimeNs begun = clock_.now();
    while (clock_.now() - begun < kPatienceMs * kMillisecond) {
      const Result<std::uint64_t> token = client_->lookup({{key}, {}, {}});
      if (!token) return token.error();
      for (bool is_answered = false; !is_answered && clock_.now() - begun < kPatienceMs * kMillisecond;) {
        pollfd item{client_->fd(), POLLIN, 0};
        ::poll(&item, 1, 100);
        for (const controller::ClientEvent& event : client_->process(clock_.now())) {
          const auto* reply = std::get_if<controller::LookupReply>(&event);
          if (reply == nullptr || reply->token != *token) continue;
          if (!reply->holders.empty()) return {};
          is_answered = true;
        }
      }
    }
    return no_answer();
  }

 private:
  explicit Node(std::unique_ptr<controller::Client> client) : client_(std::move(client)) {}
  std::unique_ptr<controller::Client> client_;
  SteadyClock clock_;
};

}  // namespace

Result<void> measure_visible(const ControllerFarSide& far, ControllerReport& report) {
  report.begin("published chunks become visible");
  Result<Node> publisher = Node::make(far.zmq, "publisher");
  if (!publisher) return std::move(publisher).error();
  Result<Node> asker = Node::make(far.stream, "asker_visible");
  if (!asker) return std::move(asker).error();
  const SteadyClock clock;
  std::vector<double> times_us;
  std::vector<ChunkKey> keys(kBatchKeys);
  std::vector<controller::ChunkEntry> chunks(kBatchKeys);
  const TimeNs begun = clock.now();
  for (std::uint64_t turn = 0; turn < kTurns; ++turn) {
    // The second of two turns evicts what the first one published, so that the index keeps its size.
    const std::uint64_t prefix = kFirstPrefix + turn / 2;
    const TimeNs published = clock.now();
    for (std::uint64_t batch = 0; batch < kBatchesPerTurn; ++batch) {
      fill_keys<ChunkKey>(prefix, batch * kBatchKeys, keys);
      for (std::size_t i = 0; i < keys.size(); ++i) chunks[i] = {keys[i], 256, false, {}};
      if (turn % 2 == 0)
        publisher->client().publish(chunks);
      else
        publisher->client().evict(keys);
    }
    (void)publisher->client().process(published);
    if (turn % 2 == 0) {
      if (Result<void> found = asker->wait_for(keys.back()); !found) return found;
      times_us.push_back(static_cast<double>(clock.now() - published) * 1e-3);
    }
    const TimeNs next = begun + static_cast<TimeNs>(turn + 1) * kTurn;
    if (const TimeNs left = next - clock.now(); left > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(left));
  }
  const double took_s = static_cast<double>(clock.now() - begun) * 1e-9;
  const double hashes_per_s = static_cast<double>(kTurns * kBatchesPerTurn * kBatchKeys) / took_s;
  const Speed speed = speed_of(times_us);
  report.row("visible, from publish() to the first answer",
             fmt::format("{:>9.1f} M hashes/s   p50 {:>6.0f} us   p99 {:>6.0f} us", hashes_per_s * 1e-6, speed.us_p50,
                         speed.us_p99));
  report.figure("visible_us_p50", speed.us_p50);
  report.figure("visible_us_p99", speed.us_p99);
  report.figure("visible_hashes_per_s", hashes_per_s);
  publisher->client().leave();
  asker->client().leave();
  return {};
}

}  // namespace kvferry::bench
