#include "launch/bench/connector/connector_bench.h"

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "launch/bench/connector/connector_calls.h"
#include "launch/bench/connector/connector_core.h"
#include "launch/bench/harness/failure.h"
#include "launch/bench/harness/figures_file.h"
#include "launch/bench/harness/flags.h"
#include "launch/bench/harness/progress.h"
#include "launch/bench/harness/statistics.h"

namespace kvferry::bench {
namespace {

using Json = nlohmann::json;

std::string text_of(const Json& figures, const std::string& name) {
  return figures.contains(name) && figures[name].is_number() ? fmt::format("{:.1f}", figures[name].get<double>())
                                                             : std::string("-");
}

std::string row(const std::string& name, const Json& figures, const std::string& step) {
  return fmt::format("{:<24} {:>12} {:>12} {:>12} {:>12}\n", name, text_of(figures, "lookup_us_p50"),
                     text_of(figures, "lookup_us_p99"), text_of(figures, step + "_us_p50"),
                     text_of(figures, step + "_us_p99"));
}

void put(Json& figures, const std::string& name, std::vector<double> times_us) {
  figures[name + "_us_p50"] = percentile(times_us, 50);
  figures[name + "_us_p99"] = percentile(times_us, 99);
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

  connectors.insert(connectors.begin(), "kvferry");
  Progress progress(2 + connectors.size());
  const Say say = [&](const std::string& line) { progress.begin_step(line); };
  const std::string step = fmt::format("step_{}", running);
  Json core;
  progress.begin_step("core: lookups");
  put(core, "lookup", time_core_lookups(static_cast<std::uint32_t>(tokens), repeat));
  progress.end_step();
  progress.begin_step("core: steps");
  put(core, step, time_core_steps(static_cast<std::uint32_t>(running), repeat));
  progress.end_step();

  const ConnectorCalls calls{vllm_python(flags.python), tokens, running, repeat};
  Json through_vllm = Json::object(), missing = Json::object();
  for (const std::string& connector : connectors) {
    progress.begin_step(connector);
    const Result<Json> figures = attempt([&] { return measure_connector_calls(connector, calls, say); });
    progress.end_step();
    if (figures) {
      through_vllm[connector] = *figures;
    } else if (figures.error().code == ErrorCode::kCancelled) {
      return figures.error();
    } else {
      missing[connector] = figures.error().what;
      progress.say(fmt::format("warning: {} is left out: {}", connector, figures.error().what));
    }
  }
  progress.make_room();
  std::string text =
      fmt::format("\n{:<24} {:>12} {:>12} {:>12} {:>12}\n", "us", "lookup p50", "p99", "step p50", "p99");
  for (const auto& [connector, figures] : through_vllm.items()) text += row(connector, figures, step);
  text += row("kvferry, core alone", core, step);
  text += fmt::format(
      "lookup: all calls of vLLM's scheduler for a request of {} tokens until it is answered, with KV in the node's "
      "own "
      "pool\nstep: all its calls in a step in which {} requests decode a token each; median of {}\n",
      tokens, running, repeat);
  fmt::print("{}", text);
  std::fflush(stdout);
  const bool has_vllm = through_vllm.contains("kvferry");
  Json all = has_vllm ? through_vllm["kvferry"] : core;
  all["called_by"] = has_vllm ? "vLLM's scheduler" : "the benchmark, without vLLM";
  all["core"] = core;
  all["connectors"] = through_vllm;
  all["missing"] = missing;
  all["machine"] = host_facts();
  return attempt([&] { write_json(flags.json_file, all); });
}

}  // namespace kvferry::bench
