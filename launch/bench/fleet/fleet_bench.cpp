#include "launch/bench/fleet/fleet_bench.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstdio>

#include "launch/bench/fleet/fleet_phases.h"
#include "launch/bench/harness/failure.h"
#include "launch/bench/harness/figures_file.h"
#include "launch/bench/harness/flags.h"
#include "launch/bench/harness/interrupt.h"
#include "launch/bench/harness/progress.h"

namespace kvferry::bench {
namespace {

constexpr std::uint64_t kNodesMin = 4;
constexpr std::uint64_t kNodesMax = 100'000;
constexpr std::uint64_t kSecondsMax = 600;
constexpr std::uint64_t kRateMax = 10'000;
constexpr std::uint64_t kChunksMin = kSystemPrompts * kSystemChunks + kConversationsMin * kOwnChunks;
constexpr std::uint64_t kStepsOfOneSize = 6;
constexpr rlim_t kFilesMax = 200'000;
// Number of file descriptors of a connection over ZeroMQ (a socket, a mailbox, an eventfd and an epoll) and over a
// stream (a socket and an epoll).
constexpr std::uint64_t kFilesOfZmqLink = 4, kFilesOfStream = 2;
constexpr std::uint64_t kFilesBeside = 200;

/// Returns a step for each size of the fleet and each rate of lookups.
Result<std::vector<FleetStep>> parse_steps(const FleetFlags& flags) {
  FlagReader reader;
  const std::vector<std::uint64_t> nodes = reader.numbers("--nodes", flags.nodes, kNodesMin, kNodesMax);
  const std::vector<std::uint64_t> lookups = reader.numbers("--lookups", flags.lookups, 0, kRateMax);
  const std::uint64_t stores = reader.number("--stores", flags.stores, 0, kRateMax);
  const std::uint64_t duration = reader.number("--seconds", flags.seconds, 1, kSecondsMax);
  const std::uint64_t chunks = reader.number("--chunks", flags.chunks, kChunksMin, 1'000'000);
  if (flags.replicas != "1" && flags.replicas != "3") reader.fail(bad_flag("--replicas", flags.replicas, "1, 3"));
  if (flags.over != "zmq" && flags.over != "stream") reader.fail(bad_flag("--over", flags.over, "zmq, stream"));
  reader.output_files(flags.json_file, flags.plot_file);
  if (!reader.result()) return reader.result().error();
  std::vector<FleetStep> steps;
  for (const std::uint64_t num_nodes : nodes) {
    for (const std::uint64_t rate : lookups)
      steps.push_back(
          {.load = {.num_nodes = static_cast<std::uint32_t>(num_nodes),
                    .conversations_per_node = (chunks - kSystemPrompts * kSystemChunks) / kOwnChunks,
                    .stores_per_s = static_cast<double>(stores),
                    .lookups_per_s = static_cast<double>(rate)},
           .controllers = {.num_replicas = flags.replicas == "3" ? 3U : 1U, .over_streams = flags.over == "stream"},
           .duration = static_cast<TimeNs>(duration) * kSecond});
  }
  return steps;
}

Result<void> check_files(const std::vector<FleetStep>& steps) {
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  const rlimit more{kFilesMax, kFilesMax};  // if this process is root, it may raise the hard limit
  if (files.rlim_max < kFilesMax && ::setrlimit(RLIMIT_NOFILE, &more) == 0) files.rlim_max = kFilesMax;
  files.rlim_cur = files.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &files);
  for (const FleetStep& step : steps) {
    const std::uint64_t files_of_link = step.controllers.over_streams ? kFilesOfStream : kFilesOfZmqLink;
    const std::uint64_t files_of_node = step.controllers.num_replicas * files_of_link + 1;
    if (step.load.num_nodes * files_of_node + kFilesBeside <= files.rlim_max) continue;
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("--nodes is '{}', but this process may open {} files and each node takes up to {}; "
                             "allowed: {} to {}, or more after `ulimit -Hn` has raised the limit on open files",
                             step.load.num_nodes, files.rlim_max, files_of_node, kNodesMin,
                             (std::max<std::uint64_t>(files.rlim_max, kFilesBeside) - kFilesBeside) / files_of_node)};
  }
  return {};
}

std::string table(const nlohmann::json& rows) {
  std::string text = fmt::format(
      "{:>6} {:>8} {:>8} {:>8} {:>15} {:>9} {:>9} {:>6} {:>8} {:>7} {:>8} {:>9} {:>8}\n{:>6} {:>8} {:>8} {:>8} {:>15} "
      "{:>9} {:>9} {:>6} {:>8} {:>7} {:>8} {:>9} {:>8}\n",
      "nodes", "lookups", "all join", "publish", "messages/s", "lookup", "lookup", "cores", "MiB", "dead", "rolling",
      "restart/", "bench", "", "/s", "s", "s", "in / out", "p50 us", "p99 us", "", "", "seen s", "s", "failover",
      "cores");
  for (const nlohmann::json& row : rows) {
    const char* back = row["replicas"] == 1 ? "restart_register_s" : "failover_s";
    text += fmt::format("{:>6} {:>8} {:>8} {:>8} {:>15} {:>9} {:>9} {:>6} {:>8} {:>7} {:>8} {:>9} {:>8}  {}\n",
                        row["nodes"].get<int>(), number_text(row, "lookups_per_s", 0),
                        number_text(row, "register_s", 2), number_text(row, "told_s", 2),
                        number_text(row, "messages_in_per_s", 0) + " / " + number_text(row, "messages_out_per_s", 0),
                        number_text(row, "lookup_us_p50", 0), number_text(row, "lookup_us_p99", 0),
                        number_text(row, "controller_cores", 2), number_text(row, "controller_rss_mib", 0),
                        number_text(row, "dead_noticed_s_max", 2), number_text(row, "rolling_s", 2),
                        number_text(row, back, 2), number_text(row, "bench_cores", 2), row["broke"].get<std::string>());
  }
  return text;
}

}  // namespace

Result<void> run_fleet_bench(const FleetFlags& flags) {
  const Result<std::vector<FleetStep>> steps = parse_steps(flags);
  if (!steps) return steps.error();
  if (Result<void> ok = check_files(*steps); !ok) return ok;
  catch_interrupts();
  Progress progress(steps->size() * kStepsOfOneSize);
  nlohmann::json rows = nlohmann::json::array();
  Result<void> measured;
  for (const FleetStep& step : *steps) {
    std::size_t num_begun = 0;
    measured = attempt([&] {
      rows.push_back(run_fleet_step(step, [&](const std::string& what) {
        if (num_begun++ > 0) progress.end_step();
        progress.begin_step(fmt::format("{} nodes: {}", step.load.num_nodes, what));
      }));
    });
    if (!measured) break;  // keeps the figures of the sizes measured before, which took minutes
    for (; num_begun <= kStepsOfOneSize; ++num_begun) progress.end_step();
  }
  if (rows.empty()) return measured;
  progress.make_room();
  fmt::print("\n{} controller{}, over {}; each node holds {} chunks, and stores and evicts {} per second\n{}",
             flags.replicas, flags.replicas == "1" ? "" : "s", flags.over, flags.chunks, flags.stores, table(rows));
  std::fflush(stdout);
  const nlohmann::json figures = {{"rows", rows}, {"machine", host_facts()}};
  return attempt([&] {
    write_json(flags.json_file, figures);
    need(measured);
    draw(flags.plot_file, "fleet", figures, [&](const std::string& line) { progress.say(line); });
  });
}

}  // namespace kvferry::bench
