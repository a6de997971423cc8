#include "launch/bench/connector/connector_bench.h"

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "launch/bench/connector/connector_calls.h"
#include "launch/bench/connector/connector_core.h"
#include "launch/bench/harness/failure.h"
#include "launch/bench/harness/figures_file.h"
#include "launch/bench/harness/flags.h"
#include "launch/bench/harness/interrupt.h"
#include "launch/bench/harness/progress.h"
#include "launch/bench/harness/statistics.h"

namespace kvferry::bench {
namespace {

using Json = nlohmann::json;

std::string row(const std::string& name, const Json& figures, const std::string& step) {
  return fmt::format("{:<24} {:>12} {:>12} {:>12} {:>12}\n", name, number_text(figures, "lookup_us_p50", 1),
                     number_text(figures, "lookup_us_p99", 1), number_text(figures, step + "_us_p50", 1),
                     number_text(figures, step + "_us_p99", 1));
}

void put(Json& figures, const std::string& name, std::vector<double> times_us) {
  figures[name + "_us_p50"] = percentile(times_us, 50);
  figures[name + "_us_p99"] = percentile(times_us, 99);
}

void run(const ConnectorCalls& calls, std::vector<std::string> connectors, const std::string& json_file) {
  connectors.insert(connectors.begin(), "kvferry");
  Progress progress(2 + connectors.size());
  const Say say = [&](const std::string& line) { progress.begin_step(line); };
  const std::string step = fmt::format("step_{}", calls.running);
  Json core;
  progress.begin_step("kvferry's core alone: lookups");
  put(core, "lookup", time_core_lookups(static_cast<std::uint32_t>(calls.tokens), calls.repeat));
  progress.end_step();
  progress.begin_step("kvferry's core alone: steps");
  put(core, step, time_core_steps(static_cast<std::uint32_t>(calls.running), calls.repeat));
  progress.end_step();

  Json through_vllm = Json::object(), missing = Json::object();
  for (const std::string& connector : connectors) {
    progress.begin_step(connector);
    try_part(
        connector, missing, [&](const std::string& line) { progress.say(line); },
        [&] { through_vllm[connector] = measure_connector_calls(connector, calls, say); });
    progress.end_step();
  }
  progress.make_room();
  std::string text =
      fmt::format("\n{:<24} {:>12} {:>12} {:>12} {:>12}\n", "us", "lookup p50", "p99", "step p50", "p99");
  for (const auto& [connector, figures] : through_vllm.items()) text += row(connector, figures, step);
  text += row("kvferry, core alone", core, step);
  text += fmt::format(
      "lookup: all calls with which vLLM's scheduler looks up a request of {} tokens, whose KV is in the node's own "
      "pool\nstep: all calls of the scheduler in a step in which {} requests decode one token each; {} repetitions\n",
      calls.tokens, calls.running, calls.repeat);
  fmt::print("{}", text);
  std::fflush(stdout);
  const bool has_vllm = through_vllm.contains("kvferry");
  Json all = has_vllm ? through_vllm["kvferry"] : core;
  all["called_by"] = has_vllm ? "vLLM's scheduler" : "the benchmark, without vLLM";
  all["core"] = core;
  all["connectors"] = through_vllm;
  all["missing"] = missing;
  all["machine"] = host_facts();
  write_json(json_file, all);
}

}  // namespace

Result<void> run_connector_bench(const ConnectorFlags& flags) {
  FlagReader reader;
  const std::uint64_t tokens = reader.number("--tokens", flags.tokens, 256, 65536);
  const std::uint64_t running = reader.number("--running", flags.running, 1, 4096);
  const std::uint64_t repeat = reader.number("--repeat", flags.repeat, 10, 2000);
  reader.output_files(flags.json_file, "");
  std::vector<std::string> connectors = reader.peers(flags.peers, kConnectorPeers);
  if (!reader.result()) return reader.result();
  catch_interrupts();
  const ConnectorCalls calls{vllm_python(flags.python), tokens, running, repeat};
  return attempt([&] { run(calls, std::move(connectors), flags.json_file); });
}

}  // namespace kvferry::bench
