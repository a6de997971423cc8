// Tests chunks of whole blocks: tails and hits end at the ends of blocks.
#include <gmock/gmock.h>

#include <utility>

#include "core_bench.h"

namespace kvferry::sim {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr std::uint32_t kWholeChunk = 64, kWholeBlock = 16;

class WholeBlocks : public CoreBench {
 protected:
  explicit WholeBlocks(std::vector<KvGroup> groups = {{kWholeBlock}}) : CoreBench(with_blocks(std::move(groups))) {}
  static CoreConfig with_blocks(std::vector<KvGroup> groups) {
    CoreConfig config = sizes(kWholeChunk, kWholeBlock, 32);
    config.groups = std::move(groups);
    config.whole_blocks = true;
    return config;
  }
  void hand_over(std::size_t num_tokens) {
    NewRequest added = request("a", num_tokens);
    added.handoff = true;
    core_->add_request(std::move(added), now_);
  }
};

TEST_F(WholeBlocks, ATailEndsAtTheEndOfABlock) {
  add("a", 90);
  EXPECT_THAT(saved_blocks(compute("a", 90, blocks(1, 6))), ElementsAre(1, 2, 3, 4));
  core_->finished(RequestId{"a"}, 90, {blocks(1, 6)}, false, now_);
  const StepPlan plan = build();
  ASSERT_THAT(plan.saves_before, SizeIs(1));
  EXPECT_THAT(plan.saves_before[0].block_ids, ElementsAre(ElementsAre(5)));
  EXPECT_EQ(plan.saves_before[0].items.at(0).num_tokens, kWholeBlock);
}

TEST_F(WholeBlocks, WhatIsShorterThanABlockIsNotSaved) {
  add("a", 15);
  EXPECT_THAT(compute("a", 15, blocks(1, 1)).saves_after, IsEmpty());
  core_->finished(RequestId{"a"}, 15, {blocks(1, 1)}, false, now_);
  EXPECT_THAT(build().saves_before, IsEmpty());
}

TEST_F(WholeBlocks, AHitEndsAtTheEndOfABlockBeforeTheLastToken) {
  cache(90);
  for (const auto& [num_tokens, hit] : {std::pair{90u, 80u}, {81u, 80u}, {80u, 64u}, {64u, 48u}, {16u, 0u}}) {
    const std::string id = std::to_string(num_tokens);
    add(id, num_tokens);
    EXPECT_EQ(lookup(id).num_external, hit) << num_tokens;
  }
}

TEST_F(WholeBlocks, ALoadTakesTheFirstBlocksOfALongerTail) {
  cache(120);  // the tail ends at token 112
  add("b", 112);
  EXPECT_EQ(lookup("b", 32).num_external, 64u);
  core_->allocated(RequestId{"b"}, 64, {blocks(1, 7)}, now_);
  const StepPlan plan = build({{{RequestId{"b"}, 96, 16, BlockTable{blocks(1, 7)}}}, {}});
  ASSERT_THAT(plan.loads, SizeIs(1));
  EXPECT_THAT(plan.loads[0].block_ids, ElementsAre(ElementsAre(3, 4, 5, 6)));
  EXPECT_EQ(plan.loads[0].items.back().chunk_tokens, 48u);
  EXPECT_EQ(plan.loads[0].items.back().num_tokens, 32u);
}

TEST_F(WholeBlocks, NothingIsLoadedAfterAHitThatEndsInsideABlock) {
  cache(90);
  add("b", 90);
  EXPECT_EQ(lookup("b", 20).num_external, 0u);
}

TEST_F(WholeBlocks, APromptThatIsHandedOverIsPinnedUpToItsLastFullBlock) {
  hand_over(90);
  EXPECT_THAT(saved_blocks(compute("a", 90, blocks(1, 6))), ElementsAre(1, 2, 3, 4, 5));
  EXPECT_EQ(core_->finished(RequestId{"a"}, 90, {blocks(1, 6)}, false, now_).handoff_tokens, 90u);
  build();
  std::size_t num_pinned = 0;
  for (const auto& [id, pin] : core_->pool().pins()) num_pinned += pin.chunks.size();
  EXPECT_EQ(num_pinned, 2u);
}

TEST_F(WholeBlocks, ASourceIsAskedForWholeBlocksOnly) {
  NewRequest added = request("b", 90);
  added.source = HandoffSource{"tcp://p:1", "a.1", 90};
  core_->add_request(std::move(added), now_);
  const auto asked = take<RequestLease>();
  ASSERT_THAT(asked, SizeIs(1));
  cache(90);  // gives the keys of the chunks that a source has
  for (const ChunkKey& key : asked[0].request.keys) EXPECT_NE(core_->pool().find(key), nullptr);
  EXPECT_THAT(asked[0].request.keys, SizeIs(2));
}

class WholeBlocksOfTwoSizes : public WholeBlocks {
 protected:
  WholeBlocksOfTwoSizes() : WholeBlocks({{kWholeBlock}, {2 * kWholeBlock}}) {}
};

TEST_F(WholeBlocksOfTwoSizes, AHitEndsWhereABlockOfEachGroupDoes) {
  add("a", 120);
  EXPECT_EQ(lookup("a").num_external, 0u);
  const BlockTable table{blocks(1, 8), blocks(101, 4)};
  core_->allocated(RequestId{"a"}, 0, table, now_);
  build({{{RequestId{"a"}, 0, 120, table}}, {}});
  core_->finished(RequestId{"a"}, 120, table, false, now_);
  EXPECT_THAT(build().saves_before.at(0).block_ids, ElementsAre(ElementsAre(5, 6), ElementsAre(103)));
  add("b", 120);
  EXPECT_EQ(lookup("b").num_external, 96u);
}

}  // namespace
}  // namespace kvferry::sim
