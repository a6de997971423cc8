#include "launch/bench/connector/connector_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "launch/bench/connector/connector_calls.h"
#include "launch/bench/connector/connector_core.h"
#include "launch/bench/harness/host_facts.h"
#include "launch/bench/harness/median.h"
#include "launch/bench/transfer/options.h"
#include "launch/bench/harness/progress.h"

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
  std::sort(times_us.begin(), times_us.end());
  figures[name + "_us_p50"] = median(times_us);
  figures[name + "_us_p99"] = times_us[times_us.size() * 99 / 100];
}

}  // namespace

Result<void> run_connector_bench(const ConnectorFlags& flags) {
  const Result<std::uint64_t> tokens = parse_number("--tokens", flags.tokens, 256, 65536);
  if (!tokens) return tokens.error();
  const Result<std::uint64_t> running = parse_number("--running", flags.running, 1, 4096);
  if (!running) return running.error();
  const Result<std::uint64_t> repeat = parse_number("--repeat", flags.repeat, 10, 2000);
  if (!repeat) return repeat.error();
  if (Result<void> ok = check_file("--json", flags.json_file, ""); !ok) return ok;
  Result<std::vector<std::string>> peers = parse_connector_peers(flags.peers);
  if (!peers) return std::move(peers).error();

  peers->insert(peers->begin(), "kvferry");
  Progress progress(2 + peers->size());
  const auto say = [&](const std::string& line) { progress.begin_step(line); };
  const std::string step = fmt::format("step_{}", *running);
  Json core;
  progress.begin_step("core: look-ups");
  put(core, "lookup", time_core_lookups(static_cast<std::uint32_t>(*tokens), *repeat));
  progress.end_step();
  progress.begin_step("core: steps");
  put(core, step, time_core_steps(static_cast<std::uint32_t>(*running), *repeat));
  progress.end_step();

  const ConnectorCalls calls{vllm_python(flags.python), *tokens, *running, *repeat};
  Json through_vllm = Json::object(), missing = Json::object();
  for (const std::string& connector : *peers) {
    progress.begin_step(connector);
    const Result<Json> figures = measure_connector_calls(connector, calls, say);
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
      fmt::format("\n{:<24} {:>12} {:>12} {:>12} {:>12}\n", "us", "look-up p50", "p99", fmt::format("step p50"), "p99");
  for (const auto& [connector, figures] : through_vllm.items()) text += row(connector, figures, step);
  text += row("kvferry, core alone", core, step);
  text += fmt::format(
      "look-up: all that vLLM's scheduler calls for a request of {} tokens until it is answered, KV in the node's own "
      "pool\nstep: all that it calls in a step in which {} requests decode a token each; median of {}\n",
      *tokens, *running, *repeat);
  fmt::print("{}", text);
  std::fflush(stdout);
  if (flags.json_file.empty()) return {};
  const bool has_vllm = through_vllm.contains("kvferry");
  Json all = has_vllm ? through_vllm["kvferry"] : core;
  all["called_by"] = has_vllm ? "vLLM's scheduler" : "the benchmark: there is no vLLM here";
  all["core"] = core;
  all["connectors"] = through_vllm;
  all["missing"] = missing;
  all["machine"] = host_facts();
  std::ofstream file(flags.json_file);
  file << all.dump(2) << '\n';
  file.close();
  if (!file) return Error{ErrorCode::kUnavailable, fmt::format("can't write {}", flags.json_file)};
  return {};
}

}  // namespace kvferry::bench
