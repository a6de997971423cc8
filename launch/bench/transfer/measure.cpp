#include "launch/bench/transfer/measure.h"

#include <algorithm>
#include <thread>

#include "launch/bench/harness/statistics.h"
#include "launch/bench/transfer/worker.h"
#include "launch/bench/transfer/worker_pair.h"

namespace kvferry::bench {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kRounds = 2000;
constexpr std::uint64_t kRoundsMin = 100;
constexpr std::uint64_t kRoundsFirst = 20;
constexpr double kPingSecondsMax = 1;  // limit of the time of all rounds; large blocks may take longer (kRoundsMin)
constexpr std::uint64_t kCallBytes[] = {64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20};

struct Timed {
  double seconds = 0;
  double cpu_s = 0;
};

Timed transfer_once(WorkerPair& pair) {
  const auto [initiator, target] = pair.ask_together({{"do", "transfer"}}, {{"do", "answer"}});
  return {std::max(initiator.value("seconds", 0.0), 1e-9), initiator.value("cpu_s", 0.0) + target.value("cpu_s", 0.0)};
}

/// Returns the number of bytes per system call that is fastest for this job; only the engine "socket" uses it.
std::uint64_t tune(WorkerPair& pair, const Job& job) {
  std::uint64_t best = 0;
  double best_seconds = 0;
  for (const std::uint64_t call_bytes : kCallBytes) {
    pair.ask_both({{"do", "prepare"}, {"job", to_json(job, call_bytes)}});
    std::vector<double> seconds;
    for (int i = 0; i < 3; ++i) seconds.push_back(transfer_once(pair).seconds);
    if (best == 0 || median(seconds) < best_seconds) {
      best = call_bytes;
      best_seconds = median(seconds);
    }
  }
  return best;
}

void ping(WorkerPair& pair, std::uint64_t rounds, Row& row) {
  const Json answer =
      pair.ask_together({{"do", "ping"}, {"rounds", rounds}}, {{"do", "pong"}, {"rounds", rounds}}).initiator;
  row.latency_us_p50 = answer.value("p50_us", 0.0);
  row.latency_us_p99 = answer.value("p99_us", 0.0);
}

/// Runs kRoundsFirst rounds to warm up and to estimate how many rounds fit into kPingSecondsMax if ping() is a round
/// trip. Then measures that many rounds, but at least kRoundsMin and at most kRounds.
void measure_latency(WorkerPair& pair, Row& row) {
  ping(pair, kRoundsFirst, row);
  const double rounds = kPingSecondsMax * 1e6 / std::max(2 * row.latency_us_p50, 1e-3);
  ping(pair, static_cast<std::uint64_t>(std::clamp<double>(rounds, kRoundsMin, kRounds)), row);
}

std::string measure_row(WorkerPair& pair, const Job& job, int repeat, Row& row) {
  std::uint64_t seed = 2 * job.order_seed;
  pair.ask_both({{"do", "fill"}, {"seed", seed}});
  const std::uint64_t call_bytes = row.engine == "socket" ? tune(pair, job) : 0;
  pair.ask_both({{"do", "prepare"}, {"job", to_json(job, call_bytes)}});
  std::vector<double> seconds;
  std::vector<double> cpu_s;
  for (int i = 0; i <= repeat; ++i) {
    // The last transfer moves other bytes than those before, so that the check fails if bytes of an earlier transfer
    // are found.
    if (i == repeat) pair.ask_both({{"do", "fill"}, {"seed", ++seed}});
    const Timed timed = transfer_once(pair);
    if (i == 0) continue;  // warm-up
    seconds.push_back(timed.seconds);
    cpu_s.push_back(timed.cpu_s);
  }
  row.gb_per_s = static_cast<double>(job.bytes()) / median(seconds) / 1e9;
  row.cpu_s_per_gib = median(cpu_s) / (static_cast<double>(job.bytes()) / (1 << 30));
  const Json question{{"do", "verify"}, {"seed", seed}};
  const Json verified = job.is_push && !pair.is_alone() ? pair.ask_target(question) : pair.ask_initiator(question);
  row.verified = verified.value("verified", false);
  measure_latency(pair, row);
  return verified.value("describe", "");
}

}  // namespace

Measured measure(const Point& point, const TransferOptions& options, FarSide& far) {
  const auto& [path, memory, shape, contender] = point;
  const bool is_pinned = options.pin && !contender.is_free && std::thread::hardware_concurrency() > 1;
  const WorkerSpec spec{
      contender.engine,   contender.setting, path, memory, Side::kInitiator, shape.block_bytes * shape.num_blocks,
      is_pinned ? 0 : -1, far.host()};
  WorkerPair pair(far.link(), spec, contender.engine == "memcpy");
  pair.connect(spec, is_pinned ? (far.is_same_host() ? 1 : 0) : -1);
  Measured measured;
  measured.huge_page_bytes = pair.huge_page_bytes();
  for (const bool is_push : options.pushes) {
    Row row{.engine = contender.engine,
            .setting = contender.setting,
            .path = path,
            .memory = name_of(memory),
            .op = is_push ? "push" : "pull",
            .block_bytes = shape.block_bytes,
            .num_blocks = shape.num_blocks};
    const Job job{is_push, shape.block_bytes, shape.num_blocks, 1 + shape.block_bytes % 1000 + (is_push ? 1000 : 0)};
    measured.describe = measure_row(pair, job, options.repeat, row);
    measured.rows.push_back(std::move(row));
  }
  return measured;
}

}  // namespace kvferry::bench
