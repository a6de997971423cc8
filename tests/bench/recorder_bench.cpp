// Measures what the flight recorder and the metrics of transfers cost: an event, a step, and which share of the time of
// running pulls they take. That share is computed from counts and the cost of each: throughput with and without them
// differs by less than two runs of the same do.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "connector/core/scheduler/scheduler_core.h"
#include "connector/runtime/worker/transport_peers.h"
#include "transport/base/check.h"
#include "transport/make_transport.h"
#include "transport/shared_memory.h"

namespace kvferry {
namespace {

constexpr std::uint32_t kEvents = 32'768, kRequests = 4096;  // as in a scheduler node
constexpr int kRounds = 41;

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

/// Returns the microseconds that an event takes, if a request has 16 of them.
double event_us(const Clock& clock) {
  FlightRecorder recorder(kEvents, kRequests);
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) {
    const TimeNs began = clock.now();
    for (int i = 0; i < 1000; ++i) {
      const std::uint64_t request = recorder.begin("cmpl-6f1a42c0ffee-0-11112222");
      for (int event = 0; event < 16; ++event) recorder.add(request, LifeKind::kPulled, began).path = "shm";
    }
    times.push_back(static_cast<double>(clock.now() - began) / 16e6);
  }
  return median(times);
}

/// Returns the microseconds that metrics take to read an event of a transfer.
double read_us(const Clock& clock) {
  FlightRecorder recorder(kEvents, kRequests);
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t last = recorder.last();
    for (int i = 0; i < 1000; ++i) recorder.add(recorder.begin("cmpl-6f1a42c0ffee-0-11112222"), LifeKind::kPulled, 0);
    const TimeNs began = clock.now();
    const std::size_t num_read = recorder.transfers_after(last, began).size();
    times.push_back(static_cast<double>(clock.now() - began) / 1e3 / static_cast<double>(num_read));
  }
  return median(times);
}

double clock_us(const Clock& clock) {
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) {
    const TimeNs began = clock.now();
    TimeNs ended = began;
    for (int i = 0; i < 1000; ++i) ended = clock.now();
    times.push_back(static_cast<double>(ended - began) / 1e6);
  }
  return median(times);
}

/// Microseconds of one event that is recorded, of one that metrics read, and of a look at the clock.
struct Costs {
  double event_us = 0, read_us = 0, clock_us = 0;
};

/// Prints the time of a step in which requests decode, and the most events that such a step recorded.
void bench_steps(const Clock& clock, std::uint32_t num_requests) {
  CoreConfig config;
  config.fingerprint = "benchmark";
  config.num_slots = 4096;
  config.num_recorded_events = kEvents;
  config.num_recorded_requests = kRequests;
  SchedulerCore core(config);
  core.set_directory_up(false);
  constexpr std::uint32_t kPrompt = 520;
  std::vector<std::int32_t> tokens(kPrompt + 200);
  StepInput step;
  for (std::uint32_t i = 0; i < num_requests; ++i) {
    std::iota(tokens.begin(), tokens.end(), static_cast<std::int32_t>(i * 1000));
    NewRequest request;
    request.id = RequestId{fmt::format("r{}", i)};
    request.tokens.assign(tokens.data(), tokens.data() + kPrompt);
    request.num_prompt_tokens = kPrompt;
    core.add_request(request, clock.now());
    core.lookup(request.id, 0, clock.now());
    BlockTable table(1, std::vector<BlockId>(tokens.size() / config.groups[0].block_tokens + 1));
    std::iota(table[0].begin(), table[0].end(), static_cast<BlockId>(1 + i * 100));
    core.allocated(request.id, 0, table, clock.now());
    core.build_step({{{request.id, 0, kPrompt, table}}, {}}, clock.now());
    step.running.push_back({core.handle_of(request.id), kPrompt, 1});
  }
  std::vector<double> times;
  std::uint64_t most = 0;
  for (int i = 0; i < 100; ++i) {  // no chunk fills
    const std::uint64_t before = core.recorder().last();
    const TimeNs began = clock.now();
    core.build_step(step, clock.now());
    times.push_back(static_cast<double>(clock.now() - began) / 1e3);
    if (i > 0) most = std::max(most, core.recorder().last() - before);  // the first step ends the prompts
    for (RunningRequest& request : step.running) request.num_computed += 1;
  }
  fmt::print("a step in which {} requests decode: {:.1f} us, at most {} events\n", num_requests, median(times), most);
}

/// One of two transports of this process, with memory that the other one can map.
struct Side {
  Side(Path path, std::uint64_t bytes) : memory(SharedMemory::create("bench", bytes).value()) {
    TransportOptions options;
    options.path = path;
    transport = make_transport(options).value();
    region = transport->register_region(memory.region()).value();
  }
  SharedMemory memory;
  std::unique_ptr<Transport> transport;
  RegionId region;
};

/// Pulls for a second, with what the product does beside each pull: Puller reads the clock, the core records an event,
/// and the metrics read the new events each 100 ms. Counts these, and prints which share of the time they took if each
/// took what it takes alone.
void bench_pulls(const Clock& clock, const Costs& costs, Path path, std::uint64_t bytes) {
  constexpr std::uint64_t kBlock = 64 << 10, kClockReads = 4;
  constexpr TimeNs kReadsEvery = 100 * kMillisecond;
  Side here(path, bytes), there(path, bytes);
  const std::string remote = there.transport->export_region(there.region).value();
  const std::string address = there.transport->address();
  TransportPeers peers(*here.transport, clock);
  FlightRecorder recorder(kEvents, kRequests);
  PagedTransfer transfer{{}, Direction::kPull, here.region, remote, {}, ""};
  for (std::uint64_t at = 0; at < bytes; at += kBlock) transfer.ranges.push_back({at, bytes - kBlock - at, kBlock});
  const auto pull = [&] {
    const TimeNs began = clock.now();
    (void)peers.submit(address, transfer).value();
    std::vector<Completion> completions;
    while (completions.empty()) {
      here.transport->wait(kSecond);
      completions = here.transport->poll();
    }
    KVFERRY_CHECK(completions[0].code == ErrorCode::kOk, "a pull of the measurement failed: {}", completions[0].what);
    LifeEvent& event = recorder.add(recorder.begin("r"), LifeKind::kPulled, began);
    event.limit_mb_per_s = peers.completed(completions[0]);
    event.path = completions[0].path;
    event.peer = address;
  };
  pull();  // this one connects
  std::uint64_t num_pulls = 0, num_read = 0, first = recorder.last(), read = first;
  const TimeNs began = clock.now();
  TimeNs read_at = began, now = began;
  for (; now < began + kSecond; now = clock.now()) {
    pull();
    ++num_pulls;
    if (now < read_at + kReadsEvery) continue;
    num_read += recorder.transfers_after(std::exchange(read, recorder.last()), now).size();
    read_at = now;
  }
  const std::uint64_t num_events = recorder.last() - first;
  const double us = static_cast<double>(num_events) * costs.event_us + static_cast<double>(num_read) * costs.read_us +
                    static_cast<double>(num_pulls * kClockReads) * costs.clock_us;
  const double gb = static_cast<double>(num_pulls * bytes) / 1e9, elapsed_us = static_cast<double>(now - began) / 1e3;
  fmt::print(
      "pulls of {:>5} KiB by {:<4} {:5.2f} GB/s; a GB: {:.0f} events, {:.0f} read for metrics, {:.0f} clock "
      "reads; together {:.1f} us a GB, {:.4f} % of the time\n",
      bytes >> 10, fmt::format("{}:", name_of(path)), gb * 1e6 / elapsed_us, static_cast<double>(num_events) / gb,
      static_cast<double>(num_read) / gb, static_cast<double>(num_pulls * kClockReads) / gb, us / gb,
      100 * us / elapsed_us);
}

}  // namespace
}  // namespace kvferry

int main() {
  using namespace kvferry;
  const SteadyClock clock;
  const Costs costs{event_us(clock), read_us(clock), clock_us(clock)};
  fmt::print("an event: {:.3f} us; reading one for metrics: {:.3f} us; reading the clock: {:.3f} us\n", costs.event_us,
             costs.read_us, costs.clock_us);
  bench_steps(clock, 256);
  for (const std::uint64_t bytes : {std::uint64_t{1} << 20, std::uint64_t{16} << 20}) {
    bench_pulls(clock, costs, Path::kShm, bytes);
    bench_pulls(clock, costs, Path::kTcp, bytes);
  }
}
