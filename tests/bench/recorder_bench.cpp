// Measures what the flight recorder costs: an event, a step, and the throughput of pulls with and without it.
//
// Runs with and without take turns, so that other load on the machine affects both; figures are medians.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
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
    request.tokens = std::span(tokens).first(kPrompt);
    request.num_prompt_tokens = kPrompt;
    core.add_request(request, clock.now());
    core.lookup(request.id, 0, clock.now());
    BlockTable table(1, std::vector<BlockId>(tokens.size() / config.block_tokens + 1));
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

void bench_pulls(const Clock& clock, Path path, std::uint64_t bytes) {
  constexpr std::uint64_t kBlock = 64 << 10, kRoundBytes = 256 << 20;
  Side here(path, bytes), there(path, bytes);
  const std::string remote = there.transport->export_region(there.region).value();
  const std::string address = there.transport->address();
  TransportPeers peers(*here.transport, clock);
  FlightRecorder recorder(kEvents, kRequests);
  PagedTransfer transfer{{}, Direction::kPull, here.region, remote, {}, ""};
  for (std::uint64_t at = 0; at < bytes; at += kBlock) transfer.ranges.push_back({at, bytes - kBlock - at, kBlock});
  const auto wait = [&] {
    std::vector<Completion> completions;
    while (completions.empty()) {
      here.transport->wait(kSecond);
      completions = here.transport->poll();
    }
    KVFERRY_CHECK(completions[0].code == ErrorCode::kOk, "a pull failed: {}", completions[0].what);
    return completions[0];
  };
  const std::function<void()> without = [&] {
    PagedTransfer one = transfer;
    one.peer = here.transport->connect(address).value();
    (void)here.transport->submit(std::move(one)).value();
    (void)wait();
  };
  const std::function<void()> with = [&] {
    const TimeNs began = clock.now();
    (void)peers.submit(address, transfer).value();
    const Completion completion = wait();
    LifeEvent& event = recorder.add(recorder.begin("r"), LifeKind::kPulled, began);
    event.limit_mb_per_s = peers.completed(completion);
    event.path = completion.path;
    event.peer = address;
  };
  std::vector<double> rates[2];
  for (int round = 0; round <= kRounds; ++round) {
    for (const bool is_on : {round % 2 == 0, round % 2 != 0}) {
      const TimeNs began = clock.now();
      for (std::uint64_t i = 0; i < kRoundBytes / bytes; ++i) (is_on ? with : without)();
      const auto gb_per_s = static_cast<double>(kRoundBytes) / static_cast<double>(clock.now() - began);
      if (round > 0) rates[is_on ? 1 : 0].push_back(gb_per_s);  // the first round warms up
    }
  }
  std::vector<double> ratios;
  for (std::size_t i = 0; i < rates[0].size(); ++i) ratios.push_back(rates[1][i] / rates[0][i]);
  fmt::print("pulls of {:>5} KiB by {:<4} {:6.2f} GB/s without, {:6.2f} with; median of the rounds' ratios {:+.2f} %\n",
             bytes >> 10, fmt::format("{}:", name_of(path)), median(rates[0]), median(rates[1]),
             100 * (median(ratios) - 1));
}

}  // namespace
}  // namespace kvferry

int main() {
  using namespace kvferry;
  const SteadyClock clock;
  fmt::print("an event: {:.3f} us\n", event_us(clock));
  bench_steps(clock, 256);
  for (const std::uint64_t bytes : {std::uint64_t{1} << 20, std::uint64_t{16} << 20}) {
    bench_pulls(clock, Path::kShm, bytes);
    bench_pulls(clock, Path::kTcp, bytes);
  }
}
