// Tests the counters of tokens that were computed again, by cause.
#include <gtest/gtest.h>

#include <set>

#include "core_bench.h"

namespace kvferry::sim {
namespace {

class Recomputed : public CoreBench {
 protected:
  Recomputed() : CoreBench(sizes(8, 4, 16)) {}

  std::uint64_t tokens(Cause cause) const {
    return core_->counters().recomputed_tokens[static_cast<std::size_t>(cause)];
  }
  std::uint64_t all_tokens() const {
    std::uint64_t sum = 0;
    for (const std::uint64_t number : core_->counters().recomputed_tokens) sum += number;
    return sum;
  }
  /// Computes 24 tokens of the request, and preempts it.
  void run_and_preempt(const std::string& id) {
    core_->set_directory_up(true);
    add(id, 24);
    compute(id, 24, blocks(1, 6));
    build({{}, {RequestId{id}}});
  }
  void admit(const std::string& id) {
    const Answer answer = lookup(id);
    ASSERT_FALSE(answer.pending);
    core_->allocated(RequestId{id}, answer.num_external, {blocks(1, 8)}, now_);
  }
};

TEST_F(Recomputed, ANewPromptIsNotComputedAgain) {
  add("r", 24);
  admit("r");
  EXPECT_EQ(all_tokens(), 0u);
}

TEST_F(Recomputed, AHandedOverPromptWhoseHolderIsSilent) {
  NewRequest added = request("r", 24);
  added.source = HandoffSource{"tcp://prefill:1", "p-1.secret", 24};
  core_->add_request(added, now_);
  core_->tick(now_ += kSecond);
  admit("r");
  EXPECT_EQ(tokens(Cause::kNoAnswer), 23u) << "the engine computes the last token in any case";
  EXPECT_EQ(all_tokens(), 23u);
}

TEST_F(Recomputed, APreemptedRequestWhoseChunksAreThere) {
  run_and_preempt("r");
  admit("r");
  EXPECT_EQ(all_tokens(), 0u);
}

TEST_F(Recomputed, APreemptedRequestWhoseChunksAreGone) {
  run_and_preempt("r");
  for (const ChunkMeta& chunk : core_->snapshot()) core_->evict_ordered(std::span(&chunk.key, 1));
  ASSERT_TRUE(lookup("r").pending);
  core_->directory_answered(take<QueryDirectory>().back().fetch, {}, now_);
  admit("r");
  EXPECT_EQ(tokens(Cause::kEvicted), 23u);
  EXPECT_EQ(all_tokens(), 23u);
}

TEST_F(Recomputed, ADamagedChunkInThePool) {
  cache(16);
  add("r", 24);
  admit("r");
  const StepPlan plan = core_->build_step({{{RequestId{"r"}, 16, 8, BlockTable{blocks(1, 6)}}}, {}}, now_);
  WorkerReport report;
  report.step = plan.step;
  report.loads.push_back({"r", plan.loads.at(0).attempt, 8, {plan.loads[0].items.at(1).chunk}});
  core_->worker_report(report, now_);
  EXPECT_EQ(tokens(Cause::kDamaged), 8u);
  EXPECT_EQ(all_tokens(), 8u);
}

TEST(CauseNames, AreUniqueLabels) {
  std::set<std::string_view> names;
  for (const std::string_view name : kCauseNames) {
    EXPECT_EQ(name.find_first_not_of("abcdefghijklmnopqrstuvwxyz_"), std::string_view::npos) << name;
    EXPECT_TRUE(names.insert(name).second) << name;
  }
  EXPECT_EQ(kCauseNames[static_cast<std::size_t>(Cause::kHandoffUnusable)], "handoff_unusable");
  EXPECT_EQ(kCauseNames[static_cast<std::size_t>(Cause::kWindow)], "window");
}

}  // namespace
}  // namespace kvferry::sim
