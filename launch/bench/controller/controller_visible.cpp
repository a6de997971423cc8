#include <poll.h>

#include <thread>

#include "controller/api/client.h"
#include "launch/bench/controller/controller_nodes.h"
#include "launch/bench/controller/controller_steps.h"

namespace kvferry::bench {
namespace {

constexpr TimeNs kTurn = kMillisecond;
// Turns take at least a millisecond on average, and a batch has kBatchKeys keys, which makes up to a million hashes a
// second.
constexpr std::uint64_t kBatchesPerTurn = 32;
constexpr std::uint64_t kTurns = 4000;              // number of turns; every second turn evicts
constexpr std::uint64_t kFirstPrefix = 1ULL << 40;  // no other node holds this prefix or a later prefix

/// Repeats a lookup of the key until the answer names a holder. Throws a Failure kUnavailable after kPatienceMs.
void wait_for(const ChunkKey& key, controller::Client& client, const Clock& clock) {
  const TimeNs begun = clock.now();
  const auto is_in_time = [&] { return clock.now() - begun < kPatienceMs * kMillisecond; };
  while (is_in_time()) {
    const std::uint64_t token = need(client.lookup({{key}, {}, {}}));
    for (bool is_answered = false; !is_answered && is_in_time();) {
      pollfd item{client.fd(), POLLIN, 0};
      ::poll(&item, 1, 100);
      for (const controller::ClientEvent& event : client.process(clock.now())) {
        const auto* reply = std::get_if<controller::LookupReply>(&event);
        if (reply == nullptr || reply->token != token) continue;
        if (!reply->holders.empty()) return;
        is_answered = true;
      }
    }
  }
  throw no_answer();
}

}  // namespace

void measure_visible(const ControllerFarSide& far, ControllerReport& report) {
  report.begin("published chunks become visible");
  const std::unique_ptr<controller::Client> publisher = registered(far.zmq, "publisher");
  const std::unique_ptr<controller::Client> asker = registered(far.stream, "asker_visible");
  const SteadyClock clock;
  std::vector<double> times_us;
  std::vector<ChunkKey> keys(kBatchKeys);
  std::vector<controller::ChunkEntry> chunks(kBatchKeys);
  const TimeNs begun = clock.now();
  for (std::uint64_t turn = 0; turn < kTurns; ++turn) {
    // Every second turn evicts the chunks that the turn before it published, so that the index keeps its size.
    const std::uint64_t prefix = kFirstPrefix + turn / 2;
    const TimeNs published = clock.now();
    for (std::uint64_t batch = 0; batch < kBatchesPerTurn; ++batch) {
      fill_keys<ChunkKey>(prefix, batch * kBatchKeys, keys);
      for (std::size_t i = 0; i < keys.size(); ++i) chunks[i] = {keys[i], 256, false, {}};
      if (turn % 2 == 0)
        publisher->publish(chunks);
      else
        publisher->evict(keys);
    }
    (void)publisher->process(published);
    if (turn % 2 == 0) {
      wait_for(keys.back(), *asker, clock);
      times_us.push_back(static_cast<double>(clock.now() - published) * 1e-3);
    }
    const TimeNs next = begun + static_cast<TimeNs>(turn + 1) * kTurn;
    if (const TimeNs left = next - clock.now(); left > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(left));
  }
  const double took_s = static_cast<double>(clock.now() - begun) * 1e-9;
  const double hashes_per_s = static_cast<double>(kTurns * kBatchesPerTurn * kBatchKeys) / took_s;
  const Speed speed = speed_of(times_us);
  report.row("from publish() until a lookup finds the chunks",
             fmt::format("{:>9.1f} M hashes/s   p50 {:>6.0f} us   p99 {:>6.0f} us", hashes_per_s * 1e-6, speed.us_p50,
                         speed.us_p99));
  report.figure("visible_us_p50", speed.us_p50);
  report.figure("visible_us_p99", speed.us_p99);
  report.figure("visible_hashes_per_s", hashes_per_s);
  publisher->leave();
  asker->leave();
}

}  // namespace kvferry::bench
