// Tests models with state: a hit ends where the pool has the state. A state is saved after the step that ends there.
#include <gmock/gmock.h>

#include <utility>

#include "core_bench.h"

namespace kvferry::sim {
namespace {

using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr std::uint32_t kStateBlock = 16;

class Stateful : public CoreBench {
 protected:
  explicit Stateful(bool runs_ahead = false, std::uint32_t checkpoint_alignment = 0)
      : CoreBench(with_state(runs_ahead, checkpoint_alignment)) {}
  static CoreConfig with_state(bool runs_ahead, std::uint32_t checkpoint_alignment) {
    CoreConfig config = sizes(kStateBlock, kStateBlock, 32);
    config.groups = {{kStateBlock}, {kStateBlock, kStateBlock}};
    config.keeps_state = true;
    config.checkpoint_alignment = checkpoint_alignment;
    config.runs_ahead = runs_ahead;
    return config;
  }
  /// Block i of group g has the id 1 + i + 100 * g. Group 1 has only the block of the state after `end` tokens.
  static BlockTable table(std::uint32_t end) {
    const std::size_t num = (end + kStateBlock - 1) / kStateBlock;
    BlockTable table = {blocks(1, num), std::vector<BlockId>(num, kNullBlock)};
    table[1].back() = static_cast<BlockId>(100 + num);
    return table;
  }
  /// Computes tokens [from, to) of a request in one step.
  StepPlan step(const std::string& id, std::uint32_t from, std::uint32_t to) {
    return build({{{RequestId{id}, from, to - from, table(to)}}, {}});
  }
  void admit(const std::string& id, std::size_t num_tokens) {
    add(id, num_tokens);
    lookup(id);
    core_->allocated(RequestId{id}, 0, table(kStateBlock), now_);
  }
  /// Computes a prompt as vLLM does: first up to the last block boundary before the prompt's end, then the rest.
  void prefill(const std::string& id, std::uint32_t num_tokens) {
    admit(id, num_tokens);
    const std::uint32_t boundary = (num_tokens - 1) / kStateBlock * kStateBlock;
    step(id, 0, boundary);
    step(id, boundary, num_tokens);
    core_->finished(RequestId{id}, num_tokens, table(num_tokens), false, now_);
    build();
  }
};

TEST_F(Stateful, TheStateIsSavedAfterTheStepThatEndsThere) {
  admit("a", 60);
  const StepPlan plan = step("a", 0, 48);
  ASSERT_THAT(plan.saves_after, SizeIs(3));
  EXPECT_THAT(plan.saves_after[0].block_ids, ElementsAre(ElementsAre(1), ElementsAre(kNoBlock)));
  EXPECT_THAT(plan.saves_after[2].block_ids, ElementsAre(ElementsAre(3), ElementsAre(103)));
  EXPECT_THAT(step("a", 48, 60).saves_after, IsEmpty());
}

TEST_F(Stateful, AStepThatEndsInsideABlockLeavesNoState) {
  admit("a", 60);
  const StepPlan plan = step("a", 0, 40);  // the last block of the table has the state after 40 tokens
  ASSERT_THAT(plan.saves_after, SizeIs(2));
  EXPECT_THAT(plan.saves_after[1].block_ids, ElementsAre(ElementsAre(2), ElementsAre(kNoBlock)));
  add("b", 60);
  EXPECT_EQ(lookup("b").num_external, 0u);
}

TEST_F(Stateful, AHitEndsAtAStateBeforeTheLastToken) {
  prefill("a", 60);
  add("longer", 70);
  const Answer answer = lookup("longer");
  EXPECT_EQ(answer.num_external, 48u);
  EXPECT_TRUE(answer.is_async);
  core_->allocated(RequestId{"longer"}, 48, table(48), now_);
  const StepPlan plan = build();
  ASSERT_THAT(plan.loads, SizeIs(1));
  EXPECT_THAT(plan.loads[0].block_ids, ElementsAre(ElementsAre(1, 2, 3), ElementsAre(kNoBlock, kNoBlock, 103)));
  add("ends there", 48);
  EXPECT_EQ(lookup("ends there").num_external, 0u);  // one token must be computed, which needs a state before it
  add("local", 70);
  EXPECT_EQ(lookup("local", 16).num_external, 32u);
  add("inside a block", 70);
  EXPECT_EQ(lookup("inside a block", 40).num_external, 0u);  // a state can only be loaded as a whole
}

TEST_F(Stateful, NoTailIsSavedOrOffered) {
  NewRequest added = request("a", 60);
  added.handoff = true;
  added.push_to = "tcp://decode:1";
  core_->add_request(added, now_);
  EXPECT_THAT(take<OfferPush>(), ElementsAre(Field(&OfferPush::offer, Field(&PushOffer::chunks, SizeIs(3)))));
  lookup("a");
  core_->allocated(RequestId{"a"}, 0, table(kStateBlock), now_);
  step("a", 0, 48);
  EXPECT_THAT(step("a", 48, 60).saves_after, IsEmpty());
  core_->finished(RequestId{"a"}, 60, table(60), false, now_);
  EXPECT_THAT(build().saves_before, IsEmpty());
}

TEST_F(Stateful, AStateThatAChunkLacksIsSavedWithItLater) {
  prefill("a", 100);  // the pool now has the state after 96 tokens
  prefill("b", 60);   // the pool now has the state after 48 of the same tokens
  add("c", 60);
  EXPECT_EQ(lookup("c").num_external, 48u);
  add("d", 120);
  EXPECT_EQ(lookup("d").num_external, 96u);
}

TEST_F(Stateful, AStateThatAChunkLacksIsFetched) {
  prefill("a", 100);
  core_->set_directory_up(true);
  add("b", 60);
  const auto query = std::get<QueryDirectory>(core_->take_actions().back());
  core_->directory_answered(query.fetch, {{"tcp://e:1", 3, {}}}, now_);
  const auto wanted = std::get<RequestLease>(core_->take_actions().at(0));
  EXPECT_THAT(wanted.request.keys, SizeIs(1));  // the chunks before it are in the pool
  core_->lease_answered(wanted.fetch, wanted.endpoint, {7, "", {{0, {0, 1}, kStateBlock, {5}}}}, now_);
  const auto pull = take<StartPull>().at(0);
  core_->pull_done(pull.pull, 0, {true}, now_);
  EXPECT_EQ(lookup("b").num_external, 48u);
}

TEST_F(Stateful, APreemptedRequestResumesFromItsLastState) {
  admit("a", 60);
  step("a", 0, 48);
  step("a", 48, 60);
  for (std::uint32_t length = 60; length < 70; ++length) {
    core_->update_tokens(RequestId{"a"}, length, std::span(tokens_).subspan(length, 1));
    step("a", length, length + 1);
  }
  build({{}, {RequestId{"a"}}});
  EXPECT_EQ(lookup("a").num_external, 64u);
}

class StatefulAhead : public Stateful {
 protected:
  StatefulAhead() : Stateful(true) {}
};

TEST_F(StatefulAhead, AStateWhoseLastTokenIsUnknownIsSavedWithTheNextStep) {
  admit("a", 47);
  step("a", 0, 32);
  step("a", 32, 47);
  EXPECT_THAT(step("a", 47, 48).saves_after, IsEmpty());  // the output of the token is not processed yet
  core_->update_tokens(RequestId{"a"}, 47, std::span(tokens_).subspan(47, 1));
  const StepPlan plan = build({{{RequestId{"a"}, 48, 1, BlockTable{blocks(1, 4), {0, 0, 103, 104}}}}, {}});
  ASSERT_THAT(plan.saves_after, SizeIs(1));
  EXPECT_THAT(plan.saves_after[0].block_ids, ElementsAre(ElementsAre(3), ElementsAre(103)));
}

class StatefulCheckpoints : public Stateful {
 protected:
  StatefulCheckpoints() : Stateful(false, 1) {}
};

TEST_F(StatefulCheckpoints, AStepOverBlocksAlsoLeavesTheStateBeforeItsEnd) {
  admit("a", 60);
  const StepPlan plan = build({{{RequestId{"a"}, 0, 60, BlockTable{blocks(1, 4), {0, 0, 103, 104}}}}, {}});
  ASSERT_THAT(plan.saves_after, SizeIs(3));
  EXPECT_THAT(plan.saves_after[1].block_ids[1], ElementsAre(kNoBlock));
  EXPECT_THAT(plan.saves_after[2].block_ids[1], ElementsAre(103));
  add("b", 60);
  EXPECT_EQ(lookup("b").num_external, 48u);
}

TEST_F(StatefulCheckpoints, AStateForWhichTheEngineHadNoBlockIsNotThere) {
  admit("a", 60);
  const StepPlan plan = step("a", 0, 60);
  ASSERT_THAT(plan.saves_after, SizeIs(3));
  EXPECT_THAT(plan.saves_after[2].block_ids[1], ElementsAre(kNoBlock));
}

TEST_F(StatefulCheckpoints, AStepFromInsideABlockLeavesNoneBeforeItsEnd) {
  admit("a", 100);
  step("a", 0, 40);
  const StepPlan plan = build({{{RequestId{"a"}, 40, 40, BlockTable{blocks(1, 5), {0, 0, 103, 104, 105}}}}, {}});
  ASSERT_THAT(plan.saves_after, SizeIs(3));
  EXPECT_THAT(plan.saves_after[1].block_ids[1], ElementsAre(kNoBlock));
  EXPECT_THAT(plan.saves_after[2].block_ids[1], ElementsAre(105));
}

}  // namespace
}  // namespace kvferry::sim
