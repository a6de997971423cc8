// Tests preparations: loads that begin while their prompt is still being pushed to this node.
#include <gmock/gmock.h>

#include "core_bench.h"

namespace kvferry::sim {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

/// The core of the decode node. The test plays the prefill node, the router and the workers. The prompt has 40 tokens:
/// two chunks and a tail.
class Preparing : public CoreBench {
 protected:
  explicit Preparing(std::uint64_t prepared_tokens_max = 1000) : CoreBench(limited_to(prepared_tokens_max)) {}
  static CoreConfig limited_to(std::uint64_t num_tokens) {
    CoreConfig config = sizes(16, 16, 16);
    config.prepared_tokens_max = num_tokens;
    return config;
  }

  void offer(std::uint32_t num_tokens = 40) {
    TokenChain chain(root_key("model", ""), 16, {});
    chain.append(std::span(tokens_).first(num_tokens));
    PushOffer made{"model", 1, {}, {}};
    for (const ChunkMeta& chunk : chain.prefix(num_tokens)) made.chunks.push_back({chunk.key, chunk.num_tokens, {}});
    reply_ = core_->push_offered("p", made, now_);
  }
  /// The prefill node settles these chunks, and the worker revokes their grants.
  void settle(const std::vector<std::uint32_t>& indices, bool ok = true) {
    PushSettlement settlement{reply_.reservation, {}};
    for (const std::uint32_t index : indices) settlement.chunks.push_back({index, ok, 0, {9}});
    core_->push_settled(settlement, now_);
    for (const RevokeSlots& one : take<RevokeSlots>()) core_->push_revoked(one, now_);
  }
  void prepare(const std::string& id = "ahead", std::size_t num_tokens = 41) {
    NewRequest added = request(id, num_tokens);
    added.prepares = true;
    core_->add_request(added, now_);
  }
  /// The engine gives the preparation blocks. Returns the step's plan.
  StepPlan begin(const std::string& id = "ahead") {
    const Answer answer = lookup(id);
    EXPECT_TRUE(!answer.pending && answer.is_async);
    core_->allocated(RequestId{id}, answer.num_external, {blocks(1, 3)}, now_);
    return build();
  }
  void ask(std::uint32_t num_tokens = 41) {
    NewRequest added = request("r", num_tokens);
    added.source = HandoffSource{"tcp://p:1", "r", 40};
    core_->add_request(added, now_);
  }
  void report_failed(const LoadJob& job) {
    core_->worker_report({0, 0, {}, {{job.request_id, job.attempt, 0, {}}}}, now_);
  }
  void expect_idle() {
    EXPECT_EQ(core_->num_preparations(), 0u);
    EXPECT_FALSE(core_->has_unreported_loads());
    EXPECT_EQ(core_->pool().num_pins(), 0u);
  }

  PushReply reply_;
};

TEST_F(Preparing, BeginsWhenAllChunksAreOnTheirWay) {
  prepare();
  EXPECT_TRUE(lookup("ahead").pending);
  EXPECT_TRUE(lookup("ahead").awaits_step) << "running requests do not wait for it";
  build();
  offer();
  const StepPlan plan = begin();
  ASSERT_THAT(plan.ahead, SizeIs(1));
  ASSERT_THAT(plan.ahead[0].items, SizeIs(3));
  EXPECT_TRUE(plan.ahead[0].is_async);
  for (const LoadItem& item : plan.ahead[0].items) EXPECT_THAT(item.checksums, IsEmpty());
  EXPECT_EQ(plan.ahead[0].items[2].first_token, 32u);
  EXPECT_THAT(plan.loads, IsEmpty());
  EXPECT_THAT(build().ahead, IsEmpty()) << "once";
}

TEST_F(Preparing, EndsWhenItsRequestIsHereAndEveryChunkIsVerified) {
  offer();
  prepare();
  begin();
  settle({0, 1});
  ask();
  EXPECT_TRUE(lookup("r").pending);
  EXPECT_THAT(build().loads, IsEmpty());
  settle({2});
  EXPECT_TRUE(lookup("r").awaits_step);
  const StepPlan plan = build();
  ASSERT_THAT(plan.loads, SizeIs(1));
  EXPECT_EQ(plan.loads[0].request_id, "ahead");
  for (const LoadItem& item : plan.loads[0].items) EXPECT_THAT(item.checksums, ElementsAre(9));
  expect_idle();
  core_->allocated(RequestId{"ahead"}, 0, {blocks(1, 3)}, now_);  // the engine has cached its two full blocks
  const Answer answer = lookup("r", 32);
  EXPECT_EQ(answer.num_external, 8u);
  core_->allocated(RequestId{"r"}, 8, {blocks(1, 3)}, now_);
  const StepPlan both = build(
      {{{RequestId{"ahead"}, 40, 1, BlockTable{blocks(1, 3)}}, {RequestId{"r"}, 40, 1, BlockTable{blocks(1, 3)}}}, {}});
  EXPECT_THAT(both.saves_after, IsEmpty());
  core_->finished(RequestId{"ahead"}, 41, {blocks(1, 3)}, false, now_);
  EXPECT_THAT(build().saves_before, IsEmpty()) << "what follows the prompt in a preparation is not kept";
  EXPECT_EQ(core_->counters().prepared, 1u);
  EXPECT_EQ(core_->counters().preparations_abandoned, 0u);
}

TEST_F(Preparing, WaitsForItsRequestUntilADeadline) {
  offer();
  prepare();
  begin();
  settle({0, 1, 2});
  EXPECT_THAT(build().loads, IsEmpty());
  now_ += 61 * kSecond;
  const StepPlan plan = build();
  ASSERT_THAT(plan.abandoned, SizeIs(1));
  report_failed(plan.abandoned[0]);
  expect_idle();
  EXPECT_TRUE(lookup("ahead").pending) << "nothing is computed for it";
  build();
  EXPECT_EQ(core_->counters().preparations_abandoned, 1u);
}

TEST_F(Preparing, LoadsOnlyWhatTheEngineLacks) {
  offer();
  prepare();
  EXPECT_EQ(lookup("ahead", 16).num_external, 24u);
  EXPECT_EQ(lookup("ahead", 16).num_external, 24u);
  core_->allocated(RequestId{"ahead"}, 24, {blocks(1, 3)}, now_);
  const StepPlan plan = build();
  ASSERT_THAT(plan.ahead, SizeIs(1));
  EXPECT_THAT(plan.ahead[0].items, SizeIs(2));
  EXPECT_THAT(plan.ahead[0].block_ids[0], ElementsAre(2, 3));
}

TEST_F(Preparing, EndsWithAPushThatFails) {
  offer();
  prepare();
  begin();
  ask();
  EXPECT_TRUE(lookup("r").pending);
  build();
  settle({0});
  settle({1, 2}, false);
  const StepPlan plan = build();
  ASSERT_THAT(plan.abandoned, SizeIs(1));
  report_failed(plan.abandoned[0]);
  EXPECT_THAT(take<RequestLease>(), SizeIs(1)) << "the request asks the prefill node for what is missing";
  now_ += 6 * kSecond;
  EXPECT_EQ(lookup("r").num_external, 16u);
}

TEST_F(Preparing, EndsWhenItIsAborted) {
  offer();
  prepare();
  begin();
  core_->finished(RequestId{"ahead"}, 0, {blocks(1, 3)}, true, now_);
  const StepPlan plan = build();
  ASSERT_THAT(plan.abandoned, SizeIs(1));
  EXPECT_THAT(build().abandoned, IsEmpty());
  report_failed(plan.abandoned[0]);
  expect_idle();
}

TEST_F(Preparing, EndsWithAReset) {
  offer();
  prepare();
  begin();
  settle({0, 1, 2});
  core_->reset_cache();
  ask();
  EXPECT_THAT(build().abandoned, SizeIs(1));
}

TEST_F(Preparing, GivesItsBlocksToRequestsThatLackSome) {
  offer();
  prepare();
  begin();
  add("other", 10);
  EXPECT_FALSE(lookup("other").pending);  // no allocation follows
  EXPECT_THAT(build().abandoned, SizeIs(1));
}

TEST_F(Preparing, EndsWithAPreemption) {
  offer();
  prepare();
  begin();
  add("other", 10);
  compute("other", 10, blocks(4, 1));
  EXPECT_THAT(build({{}, {RequestId{"other"}}}).abandoned, SizeIs(1));
}

TEST_F(Preparing, DoesNotBeginWhenThereIsNothingToWaitFor) {
  offer();
  settle({0, 1, 2});
  prepare();
  EXPECT_TRUE(lookup("ahead").pending);
  ask();
  EXPECT_EQ(lookup("r").num_external, 40u);
  EXPECT_EQ(core_->counters().preparations_refused, 1u);
}

TEST_F(Preparing, IsRefusedIfTheEngineHasNoBlocksForIt) {
  offer();
  prepare();
  EXPECT_FALSE(lookup("ahead").pending);
  build();
  EXPECT_TRUE(lookup("ahead").pending);
  ask();
  settle({0, 1, 2});
  EXPECT_EQ(lookup("r").num_external, 40u);
}

TEST_F(Preparing, TwoOfOnePromptServeTwoRequests) {
  offer();
  prepare();
  prepare("second");
  begin();
  core_->allocated(RequestId{"second"}, lookup("second").num_external, {blocks(4, 3)}, now_);
  build();
  settle({0, 1, 2});
  ask();
  EXPECT_TRUE(lookup("r").pending);
  EXPECT_THAT(build().loads, SizeIs(1)) << "the second one waits for a request of its own";
  EXPECT_EQ(core_->num_preparations(), 1u);
}

TEST_F(Preparing, ItsChunksAreAwaitedUntilAllAreHere) {
  offer();
  prepare();
  EXPECT_FALSE(core_->awaits_prepared_chunks()) << "it has no blocks yet";
  begin();
  EXPECT_TRUE(core_->awaits_prepared_chunks());
  settle({0, 1});
  EXPECT_TRUE(core_->awaits_prepared_chunks());
  settle({2});
  EXPECT_FALSE(core_->awaits_prepared_chunks());
}

TEST_F(Preparing, ALoadThatIsReportedBeforeItsEndBreaksThePromise) {
  offer();
  prepare();
  const StepPlan plan = begin();
  EXPECT_BREAKS(core_->worker_report({0, 0, {}, {{"ahead", plan.ahead[0].attempt, 40, {}}}}, now_), "verified-only");
}

class PreparingLittle : public Preparing {
 protected:
  PreparingLittle() : Preparing(39) {}
};

TEST_F(PreparingLittle, APreparationOverTheLimitIsRefused) {
  offer();
  prepare();
  EXPECT_TRUE(lookup("ahead").pending);
  EXPECT_EQ(core_->counters().preparations_refused, 1u);
  ask();
  EXPECT_TRUE(lookup("r").pending) << "it waits for the push";
  settle({0, 1, 2});
  EXPECT_EQ(lookup("r").num_external, 40u);
}

TEST(MayPrepare, BoundsNumberAndTokens) {
  EXPECT_TRUE(may_prepare(100, 0, 0, 100));
  EXPECT_FALSE(may_prepare(101, 0, 0, 100));
  EXPECT_FALSE(may_prepare(1, 1, 100, 100));
  EXPECT_TRUE(may_prepare(1, kPreparationsMax - 1, 99, 100));
  EXPECT_FALSE(may_prepare(1, kPreparationsMax, 0, 100));
  EXPECT_FALSE(may_prepare(1, 0, 0, 0));
}

}  // namespace
}  // namespace kvferry::sim
