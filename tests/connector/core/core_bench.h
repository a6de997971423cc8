// A SchedulerCore for tests. The test plays vLLM and the network; the workers do everything right.
#pragma once

#include <gtest/gtest.h>

#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "check_throws.h"
#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry::sim {

class CoreBench : public ::testing::Test {
 protected:
  static CoreConfig sizes(std::uint32_t chunk_tokens, std::uint32_t block_tokens, std::uint32_t num_slots) {
    CoreConfig config;
    config.fingerprint = "model";
    config.chunk_tokens = chunk_tokens;
    config.groups = {{block_tokens}};
    config.num_slots = num_slots;
    return config;
  }
  /// tokens 0 .. 2999 have the values 100, 101, ...
  explicit CoreBench(const CoreConfig& config) : tokens_(3000) {
    std::iota(tokens_.begin(), tokens_.end(), 100);
    core_.emplace(config);
    core_->set_directory_up(false);
  }

  NewRequest request(const std::string& id, std::size_t num_tokens) const {
    NewRequest added;
    added.id = RequestId{id};
    added.tokens.assign(tokens_.data(), tokens_.data() + num_tokens);
    added.num_prompt_tokens = static_cast<std::uint32_t>(num_tokens);
    return added;
  }
  void add(const std::string& id, std::size_t num_tokens) { core_->add_request(request(id, num_tokens), now_); }
  static std::vector<BlockId> blocks(BlockId first, std::size_t num) {
    std::vector<BlockId> ids(num);
    std::iota(ids.begin(), ids.end(), first);
    return ids;
  }
  /// Builds a step, and reports that the workers did all of it.
  StepPlan build(const StepInput& input = {}) {
    StepPlan plan = core_->build_step(input, now_ += kMillisecond);
    core_->worker_report(well_done(plan), now_);
    return plan;
  }
  static WorkerReport well_done(const StepPlan& plan, std::uint32_t rank = 0) {
    WorkerReport report;
    report.rank = rank;
    report.step = plan.step;
    for (const auto* jobs : {&plan.saves_before, &plan.saves_after})
      for (const SaveJob& job : *jobs)
        for (const SaveItem& item : job.items) report.saves.push_back({item.chunk, true, 1});
    for (const LoadJob& job : plan.loads) {
      std::uint32_t tokens = 0;
      for (const LoadItem& item : job.items) tokens += item.num_tokens;
      report.loads.push_back({job.request_id, job.attempt, tokens, {}});
    }
    return report;
  }
  /// Admits a request without any hit, and computes its first `num` tokens.
  StepPlan compute(const std::string& id, std::uint32_t num, const std::vector<BlockId>& table) {
    EXPECT_EQ(core_->lookup(RequestId{id}, 0, now_).num_external, 0u);
    core_->allocated(RequestId{id}, 0, {table}, now_);
    return build({{{RequestId{id}, 0, num, BlockTable{table}}}, {}});
  }
  /// Saves the chunks of the first `num` tokens to the pool, with a request that runs and ends.
  void cache(std::uint32_t num) {
    const std::string id = "donor-" + std::to_string(++num_donors_);
    add(id, num);
    const std::uint32_t local = 0;
    const Answer answer = core_->lookup(RequestId{id}, local, now_);
    core_->allocated(RequestId{id}, answer.num_external, {blocks(1, num)}, now_);
    build({{{RequestId{id}, answer.num_external, num - answer.num_external, BlockTable{blocks(1, num)}}}, {}});
    core_->finished(RequestId{id}, num, {blocks(1, num)}, false, now_);
    build();
  }
  Answer lookup(const std::string& id, std::uint32_t num_local = 0) {
    return core_->lookup(RequestId{id}, num_local, now_);
  }
  static std::vector<BlockId> saved_blocks(const StepPlan& plan) {
    std::vector<BlockId> ids;
    for (const auto* jobs : {&plan.saves_before, &plan.saves_after})
      for (const SaveJob& job : *jobs) ids.insert(ids.end(), job.block_ids[0].begin(), job.block_ids[0].end());
    return ids;
  }
  /// Returns the actions of one kind since the last call, and drops all others.
  template <class Kind>
  std::vector<Kind> take() {
    std::vector<Kind> found;
    for (Action& action : core_->take_actions())
      if (auto* wanted = std::get_if<Kind>(&action)) found.push_back(std::move(*wanted));
    return found;
  }

  ChecksThrow checks_;
  TimeNs now_ = kSecond;
  std::vector<std::int32_t> tokens_;
  std::optional<SchedulerCore> core_;

 private:
  int num_donors_ = 0;
};

}  // namespace kvferry::sim
