#include "launch/bench/connector/connector_core.h"

#include <fmt/format.h>

#include <random>
#include <string>
#include <utility>

#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry::bench {
namespace {

constexpr std::uint32_t kChunkTokens = 256, kEngineBlockTokens = 32;
constexpr std::uint32_t kDistinctPrompts = 8;
constexpr std::uint32_t kPromptTokens = 500;  // length of the first prompt; each further prompt is one token longer

std::vector<std::int32_t> random_tokens(std::mt19937& random, std::uint32_t count) {
  std::vector<std::int32_t> tokens(count);
  for (std::int32_t& token : tokens) token = static_cast<std::int32_t>(random() % 32000);
  return tokens;
}

RequestId id_of(std::uint64_t number) { return RequestId{fmt::format("cmpl-{:032x}-0", number)}; }

/// Runs the steps of a scheduler core, and reports a step's saves as completed right after the step's plan is built.
class CoreDriver {
 public:
  explicit CoreDriver(std::uint32_t num_slots) : core_(config(num_slots)) { core_.set_directory_up(false); }

  void add(const RequestId& id, std::span<const std::int32_t> tokens) {
    NewRequest request;
    request.id = id;
    request.tokens.assign(tokens.begin(), tokens.end());
    request.num_prompt_tokens = static_cast<std::uint32_t>(tokens.size());
    core_.add_request(std::move(request), clock_.now());
  }
  BlockTable fresh_blocks(std::uint32_t num_tokens) {
    BlockTable table(1);
    while (table[0].size() * kEngineBlockTokens < num_tokens) table[0].push_back(++last_block_);
    return table;
  }
  void step(const StepInput& input, const TokenSource& tokens = {}) {
    const StepPlan plan = core_.build_step(input, clock_.now(), tokens);
    WorkerReport report;
    report.step = plan.step;
    for (const auto* jobs : {&plan.saves_before, &plan.saves_after})
      for (const SaveJob& job : *jobs)
        for (const SaveItem& item : job.items) report.saves.push_back({item.chunk, true, 1});
    core_.worker_report(report, clock_.now());
    core_.take_actions();
  }
  SchedulerCore& core() { return core_; }
  TimeNs now() const { return clock_.now(); }

 private:
  static CoreConfig config(std::uint32_t num_slots) {
    CoreConfig config;
    config.fingerprint = "benchmark";
    config.chunk_tokens = kChunkTokens;
    config.groups = {{kEngineBlockTokens}};
    config.num_slots = num_slots;
    return config;
  }
  SteadyClock clock_;
  SchedulerCore core_;
  BlockId last_block_ = 0;
};

}  // namespace

std::vector<double> time_core_lookups(std::uint32_t num_tokens, std::uint64_t repeat) {
  CoreDriver driver(kDistinctPrompts * (num_tokens / kChunkTokens + 2));
  std::mt19937 random(1);
  std::vector<std::vector<std::int32_t>> prompts;
  std::uint64_t number = 0;
  for (std::uint32_t i = 0; i < kDistinctPrompts; ++i) {
    const std::vector<std::int32_t>& prompt = prompts.emplace_back(random_tokens(random, num_tokens));
    const RequestId id = id_of(++number);
    const BlockTable table = driver.fresh_blocks(num_tokens);
    driver.add(id, prompt);
    driver.core().lookup(id, 0, driver.now());
    driver.core().allocated(id, 0, table, driver.now());
    driver.step({{{id, 0, num_tokens, table}}, {}});
    driver.core().finished(id, num_tokens, table, false, driver.now());
    driver.step({});
  }
  std::vector<double> times_us;
  for (std::uint64_t i = 0; i < repeat; ++i) {
    const RequestId id = id_of(++number);
    const std::vector<std::int32_t> prompt = prompts[i % prompts.size()];
    const TimeNs start = driver.now();
    driver.add(id, prompt);
    driver.core().lookup(id, 0, driver.now());
    times_us.push_back(static_cast<double>(driver.now() - start) / 1e3);
    driver.core().finished(id, 0, {}, true, driver.now());
    driver.step({});
  }
  return times_us;
}

std::vector<double> time_core_steps(std::uint32_t running, std::uint64_t repeat) {
  CoreDriver driver(4096);
  std::mt19937 random(2);
  StepInput step;
  std::vector<std::vector<std::int32_t>> texts;
  for (std::uint32_t i = 0; i < running; ++i) {
    const std::uint32_t prompt = kPromptTokens + i;
    texts.push_back(random_tokens(random, prompt + static_cast<std::uint32_t>(repeat) + 1));
    const RequestId id = id_of(i);
    const BlockTable table = driver.fresh_blocks(prompt + static_cast<std::uint32_t>(repeat) + 1);
    driver.add(id, std::span(texts.back()).first(prompt));
    driver.core().lookup(id, 0, driver.now());
    driver.core().allocated(id, 0, table, driver.now());
    driver.step({{{id, 0, prompt, table}}, {}});
    step.running.push_back({driver.core().handle_of(id), prompt, 1});
  }
  const TokenSource tokens = [&](const RequestId& id, std::uint32_t known) {
    const std::vector<std::int32_t>& text = texts[std::stoul(id.value.substr(5, 32), nullptr, 16)];
    const RunningRequest& scheduled = step.running[std::stoul(id.value.substr(5, 32), nullptr, 16)];
    return std::vector<std::int32_t>(text.begin() + known, text.begin() + scheduled.num_computed + 1);
  };
  std::vector<double> times_us;
  for (std::uint64_t i = 0; i < repeat; ++i) {
    const TimeNs start = driver.now();
    driver.step(step, tokens);
    times_us.push_back(static_cast<double>(driver.now() - start) / 1e3);
    for (RunningRequest& request : step.running) request.num_computed += 1;
  }
  return times_us;
}

}  // namespace kvferry::bench
