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
constexpr double kPingSecondsMax = 1;  // limits the rounds with large blocks
constexpr std::uint64_t kCallBytes[] = {64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20};

struct Timed {
  double seconds = 0;
  double cpu_s = 0;
};

Result<Timed> transfer_once(WorkerPair& pair) {
  const Result<WorkerPair::Answers> done = pair.ask_together({{"do", "transfer"}}, {{"do", "answer"}});
  if (!done) return done.error();
  return Timed{std::max(done->initiator.value("seconds", 0.0), 1e-9),
               done->initiator.value("cpu_s", 0.0) + done->target.value("cpu_s", 0.0)};
}

/// Returns the number of bytes a call that is fastest for this job; sockets only.
Result<std::uint64_t> tune(WorkerPair& pair, const Job& job) {
  std::uint64_t best = 0;
  double best_seconds = 0;
  for (const std::uint64_t call_bytes : kCallBytes) {
    if (Result<void> ok = pair.ask_both({{"do", "prepare"}, {"job", to_json(job, call_bytes)}}); !ok)
      return std::move(ok).error();
    std::vector<double> seconds;
    for (int i = 0; i < 3; ++i) {
      const Result<Timed> timed = transfer_once(pair);
      if (!timed) return timed.error();
      seconds.push_back(timed->seconds);
    }
    if (best == 0 || median(seconds) < best_seconds) {
      best = call_bytes;
      best_seconds = median(seconds);
    }
  }
  return best;
}

Result<void> ping(WorkerPair& pair, std::uint64_t rounds, Row& row) {
  const Result<WorkerPair::Answers> done =
      pair.ask_together({{"do", "ping"}, {"rounds", rounds}}, {{"do", "pong"}, {"rounds", rounds}});
  if (!done) return done.error();
  row.latency_us_p50 = done->initiator.value("p50_us", 0.0);
  row.latency_us_p99 = done->initiator.value("p99_us", 0.0);
  return {};
}

/// Measures as many rounds as fit into kPingSecondsMax, judged by a few first rounds, which also warm up.
Result<void> measure_latency(WorkerPair& pair, Row& row) {
  if (Result<void> ok = ping(pair, kRoundsFirst, row); !ok) return ok;
  const double rounds = kPingSecondsMax * 1e6 / std::max(2 * row.latency_us_p50, 1e-3);
  return ping(pair, static_cast<std::uint64_t>(std::clamp<double>(rounds, kRoundsMin, kRounds)), row);
}

Result<std::string> measure_row(WorkerPair& pair, const Job& job, int repeat, Row& row) {
  std::uint64_t seed = 2 * job.order_seed;
  if (Result<void> ok = pair.ask_both({{"do", "fill"}, {"seed", seed}}); !ok) return std::move(ok).error();
  std::uint64_t call_bytes = 0;
  if (row.engine == "socket") {
    const Result<std::uint64_t> tuned = tune(pair, job);
    if (!tuned) return tuned.error();
    call_bytes = *tuned;
  }
  if (Result<void> ok = pair.ask_both({{"do", "prepare"}, {"job", to_json(job, call_bytes)}}); !ok)
    return std::move(ok).error();
  std::vector<double> seconds;
  std::vector<double> cpu_s;
  for (int i = 0; i <= repeat; ++i) {
    if (i == repeat) {  // the last transfer moves other bytes, so that an earlier one can't have made it right
      if (Result<void> ok = pair.ask_both({{"do", "fill"}, {"seed", ++seed}}); !ok) return std::move(ok).error();
    }
    const Result<Timed> timed = transfer_once(pair);
    if (!timed) return timed.error();
    if (i == 0) continue;  // warm-up
    seconds.push_back(timed->seconds);
    cpu_s.push_back(timed->cpu_s);
  }
  row.gb_per_s = static_cast<double>(job.bytes()) / median(seconds) / 1e9;
  row.cpu_s_per_gib = median(cpu_s) / (static_cast<double>(job.bytes()) / (1 << 30));
  const Json question{{"do", "verify"}, {"seed", seed}};
  const Result<Json> verified =
      job.is_push && !pair.is_alone() ? pair.ask_target(question) : pair.ask_initiator(question);
  if (!verified) return verified.error();
  row.verified = verified->value("verified", false);
  if (Result<void> ok = measure_latency(pair, row); !ok) return std::move(ok).error();
  return verified->value("describe", "");
}

}  // namespace

Result<Measured> measure(const Contender& contender, const std::string& path, MemoryKind memory, const Shape& shape,
                         const TransferOptions& options, LineLink& listener, const std::string& host,
                         bool is_same_host) {
  const bool is_pinned = options.pin && !contender.is_free && std::thread::hardware_concurrency() > 1;
  const WorkerSpec spec{contender.engine,
                        contender.setting,
                        path,
                        memory,
                        Side::kInitiator,
                        shape.block_bytes * shape.num_blocks,
                        is_pinned ? 0 : -1,
                        host};
  Result<WorkerPair> pair =
      WorkerPair::start(listener, spec, is_pinned ? (is_same_host ? 1 : 0) : -1, contender.engine == "memcpy");
  if (!pair) return std::move(pair).error();
  Measured measured;
  measured.huge_page_bytes = pair->huge_page_bytes();
  for (const bool is_push : options.pushes) {
    Row row{.engine = contender.engine,
            .setting = contender.setting,
            .path = path,
            .memory = name_of(memory),
            .op = is_push ? "push" : "pull",
            .block_bytes = shape.block_bytes,
            .num_blocks = shape.num_blocks};
    const Job job{is_push, shape.block_bytes, shape.num_blocks, 1 + shape.block_bytes % 1000 + (is_push ? 1000 : 0)};
    Result<std::string> describe = measure_row(*pair, job, options.repeat, row);
    if (!describe) return std::move(describe).error();
    measured.describe = std::move(*describe);
    measured.rows.push_back(std::move(row));
  }
  return measured;
}

}  // namespace kvferry::bench
