#include "launch/bench/transfer/measure.h"

#include <algorithm>
#include <memory>
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

/// One contender in a measurement: its two processes, and what was measured of one direction.
struct Turn {
  std::unique_ptr<WorkerPair> pair;
  Row row;
  std::vector<double> seconds;
  std::vector<double> cpu_s;
  std::string describe;
};

std::unique_ptr<WorkerPair> connect(const Point& point, bool pin, FarSide& far, std::size_t number) {
  const auto& [path, memory, shape, contender] = point;
  const bool is_pinned = pin && !contender.is_free && std::thread::hardware_concurrency() > 1;
  const WorkerSpec spec{
      contender.engine,   contender.setting, path, memory, Side::kInitiator, shape.block_bytes * shape.num_blocks,
      is_pinned ? 0 : -1, far.host()};
  auto pair = std::make_unique<WorkerPair>(far.link(), spec, contender.engine == "memcpy", number);
  pair->connect(spec, is_pinned ? (far.is_same_host() ? 1 : 0) : -1);
  return pair;
}

/// Lets each contender transfer once, beginning with number `first`.
void transfer_in_turns(std::vector<Turn>& turns, std::size_t first, bool counts) {
  for (std::size_t i = 0; i < turns.size(); ++i) {
    Turn& turn = turns[(first + i) % turns.size()];
    const Timed timed = transfer_once(*turn.pair);
    if (!counts) continue;
    turn.seconds.push_back(timed.seconds);
    turn.cpu_s.push_back(timed.cpu_s);
  }
}

/// Returns the median of how many times as long as `turn` the contender `other` took in the same round.
double median_ratio(const Turn& turn, const Turn& other) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < turn.seconds.size(); ++i) ratios.push_back(other.seconds[i] / turn.seconds[i]);
  return median(std::move(ratios));
}

void measure_direction(std::vector<Turn>& turns, const Job& job, int repeat) {
  std::uint64_t seed = 2 * job.order_seed;
  for (Turn& turn : turns) {
    turn.seconds.clear();
    turn.cpu_s.clear();
    turn.pair->ask_both({{"do", "fill"}, {"seed", seed}});
    const std::uint64_t call_bytes = turn.row.engine == "socket" ? tune(*turn.pair, job) : 0;
    turn.pair->ask_both({{"do", "prepare"}, {"job", to_json(job, call_bytes)}});
  }
  transfer_in_turns(turns, 0, false);  // warm-up
  for (int round = 0; round < repeat; ++round) {
    // The last transfer moves other bytes than those before, so that the check fails if bytes of an earlier transfer
    // are found.
    if (round + 1 == repeat) {
      ++seed;
      for (Turn& turn : turns) turn.pair->ask_both({{"do", "fill"}, {"seed", seed}});
    }
    transfer_in_turns(turns, static_cast<std::size_t>(round), true);
  }
  for (Turn& turn : turns) {
    Row& row = turn.row;
    row.gb_per_s = static_cast<double>(job.bytes()) / median(turn.seconds) / 1e9;
    row.cpu_s_per_gib = median(turn.cpu_s) / (static_cast<double>(job.bytes()) / (1 << 30));
    row.of_first = turns.size() > 1 ? median_ratio(turn, turns.front()) : 0;
  }
  for (Turn& turn : turns) {
    const Json question{{"do", "verify"}, {"seed", seed}};
    const Json verified =
        job.is_push && !turn.pair->is_alone() ? turn.pair->ask_target(question) : turn.pair->ask_initiator(question);
    turn.row.verified = verified.value("verified", false);
    turn.describe = verified.value("describe", "");
    measure_latency(*turn.pair, turn.row);
  }
}

}  // namespace

std::vector<Measured> measure(std::span<const Point> points, const TransferOptions& options, FarSide& far) {
  std::vector<Turn> turns;
  std::vector<Measured> measured;
  for (const Point& point : points) {
    turns.emplace_back().pair = connect(point, options.pin, far, measured.size());
    measured.emplace_back().huge_page_bytes = turns.back().pair->huge_page_bytes();
  }
  const Shape shape = points.front().shape;
  for (const bool is_push : options.pushes) {
    for (std::size_t i = 0; i < turns.size(); ++i) {
      const Point& point = points[i];
      turns[i].row = {.engine = point.contender.engine,
                      .setting = point.contender.setting,
                      .path = point.path,
                      .memory = name_of(point.memory),
                      .op = is_push ? "push" : "pull",
                      .block_bytes = shape.block_bytes,
                      .num_blocks = shape.num_blocks};
    }
    measure_direction(
        turns, {is_push, shape.block_bytes, shape.num_blocks, 1 + shape.block_bytes % 1000 + (is_push ? 1000 : 0)},
        options.repeat);
    for (std::size_t i = 0; i < turns.size(); ++i) {
      measured[i].rows.push_back(std::move(turns[i].row));
      measured[i].describe = turns[i].describe;
    }
  }
  return measured;
}

}  // namespace kvferry::bench
