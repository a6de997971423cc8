// Tests models with several KV groups: a block table for each group, sliding windows, loads for which the engine waits.
#include <gmock/gmock.h>

#include <utility>

#include "core_bench.h"

namespace kvferry::sim {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr std::uint32_t kChunk = 64, kBlock = 16, kWindow = 24;

CoreConfig with_groups(std::vector<KvGroup> groups) {
  CoreConfig config;
  config.fingerprint = "model";
  config.chunk_tokens = kChunk;
  config.num_slots = 16;
  config.groups = std::move(groups);
  return config;
}

class Windows : public CoreBench {
 protected:
  explicit Windows(std::vector<KvGroup> groups = {{kBlock}, {kBlock, kWindow}})
      : CoreBench(with_groups(std::move(groups))) {}
  /// Block i of group g has the id 1 + i + 100 * g. The blocks of group 1 before `gone` are null blocks.
  static BlockTable table(std::size_t num, std::size_t gone = 0) {
    BlockTable table = {blocks(1, num), blocks(101, num)};
    for (std::size_t i = 0; i < gone; ++i) table[1][i] = kNullBlock;
    return table;
  }
  Answer lookup(const std::string& id, std::uint32_t num_local = 0) {
    return core_->lookup(RequestId{id}, num_local, now_);
  }
  /// Prefills 130 tokens in two steps, so that the first half of chunk 1 has left the window when the chunk is full.
  StepPlan prefill_in_two_steps(const std::string& id) {
    add(id, 130);
    lookup(id);
    core_->allocated(RequestId{id}, 0, table(9), now_);
    build({{{RequestId{id}, 0, 120, table(9)}}, {}});
    return build({{{RequestId{id}, 120, 10, std::nullopt}}, {}});
  }
};

TEST_F(Windows, ARequestWithoutKeysLetsOthersGoFirstIfNothingRunsOrLoads) {
  NewRequest added = request("without keys", 80);
  added.cacheable = false;
  core_->add_request(added, now_);
  EXPECT_FALSE(lookup("without keys").pending);
  build();  // vLLM had no free blocks for the request
  EXPECT_TRUE(lookup("without keys").pending) << "requests behind it may hold the blocks that it waits for";
  build();
  EXPECT_FALSE(lookup("without keys").pending);
  core_->allocated(RequestId{"without keys"}, 0, table(5), now_);
  build({{{RequestId{"without keys"}, 0, 80, table(5)}}, {}});
}

TEST_F(Windows, EveryKvGroupsOwnBlocksAreNamed) {
  add("a", 80);
  lookup("a");
  core_->allocated(RequestId{"a"}, 0, table(5), now_);
  const StepPlan saving = build({{{RequestId{"a"}, 0, 80, table(5)}}, {}});
  ASSERT_THAT(saving.saves_after, SizeIs(1));
  EXPECT_THAT(saving.saves_after[0].block_ids, ElementsAre(ElementsAre(1, 2, 3, 4), ElementsAre(101, 102, 103, 104)));
  add("b", 80);
  EXPECT_EQ(lookup("b", 16).num_external, 48u);
  core_->allocated(RequestId{"b"}, 48, {{1, 5, 6, 7}, {0, 0, 106, 107}}, now_);
  const StepPlan loading = build();
  ASSERT_THAT(loading.loads, SizeIs(1));
  EXPECT_THAT(loading.loads[0].block_ids, ElementsAre(ElementsAre(5, 6, 7), ElementsAre(kNoBlock, 106, 107)));
  EXPECT_EQ(loading.loads[0].items[0].skip_tokens, 16u);
}

TEST_F(Windows, AChunkIsSavedWithoutTheBlocksThatLeftTheWindowWhateverTheTableSays) {
  const StepPlan plan = prefill_in_two_steps("a");  // the request's table still has blocks 105 and 106
  ASSERT_THAT(plan.saves_after, SizeIs(1));
  EXPECT_THAT(plan.saves_after[0].block_ids,
              ElementsAre(ElementsAre(5, 6, 7, 8), ElementsAre(kNoBlock, kNoBlock, 107, 108)));
  EXPECT_EQ(core_->pool().slot(plan.saves_after[0].items[0].chunk.slot).meta.window_from, 32u);
}

TEST_F(Windows, NothingIsSavedOfAChunkWhoseBlocksAreGoneInsideTheWindow) {
  add("a", 80);
  lookup("a");
  core_->allocated(RequestId{"a"}, 0, table(5, 2), now_);
  EXPECT_THAT(build({{{RequestId{"a"}, 0, 80, table(5, 2)}}, {}}).saves_after, IsEmpty());
}

TEST_F(Windows, AHitEndsWhereTheWindowIsThere) {
  prefill_in_two_steps("a");
  add("b", 140);
  const Answer whole = lookup("b");
  EXPECT_EQ(whole.num_external, 128u);  // a hit of 128 tokens needs group 1 from token 96 on, which the chunk has
  EXPECT_TRUE(whole.is_async);
  EXPECT_EQ(lookup("b", 64).num_external, 64u);
}

TEST_F(Windows, AHolderThatLacksMoreOfTheWindowGivesAShorterHit) {
  core_->set_directory_up(true);
  add("a", 140);
  const auto query = std::get<QueryDirectory>(core_->take_actions().at(0));
  core_->directory_answered(query.fetch, {{"tcp://e:1", 2, {}}}, now_);
  const auto wanted = std::get<RequestLease>(core_->take_actions().at(0));
  LeaseReply reply{7, "", {{0, {0, 1}, kChunk, {5}}, {1, {1, 1}, kChunk, {5}, 48}}};
  core_->lease_answered(wanted.fetch, wanted.endpoint, reply, now_);
  const auto pull = std::get<StartPull>(core_->take_actions().at(0));
  core_->pull_done(pull.pull, 0, {true, true}, now_);
  // a hit of 128 tokens would need group 1 from token 96 on, but the chunk has it only from token 112 on
  EXPECT_EQ(lookup("a").num_external, 64u);
}

TEST_F(Windows, ALeaseTellsWhatTheChunkLacks) {
  prefill_in_two_steps("a");
  add("b", 140);
  const ChunkKey root = root_key("model", "");
  const ChunkKey first = chunk_key(root, std::span(tokens_).first(64), "");
  const ChunkKey second = chunk_key(first, std::span(tokens_).subspan(64, 64), "");
  const LeaseReply reply = core_->lease_requested("x", {"model", {first, second}, ""}, now_);
  ASSERT_THAT(reply.chunks, SizeIs(2));
  EXPECT_EQ(reply.chunks[0].window_from, 0u);
  EXPECT_EQ(reply.chunks[1].window_from, 32u);
}

class UnlikeBlocks : public Windows {
 protected:
  UnlikeBlocks() : Windows({{kBlock}, {2 * kBlock, kWindow}}) {}
};

TEST_F(UnlikeBlocks, EveryGroupsBlocksHaveItsOwnSize) {
  const BlockTable whole = {blocks(1, 5), blocks(101, 3)};
  add("a", 80);
  lookup("a");
  core_->allocated(RequestId{"a"}, 0, whole, now_);
  const StepPlan saving = build({{{RequestId{"a"}, 0, 80, whole}}, {}});
  ASSERT_THAT(saving.saves_after, SizeIs(1));
  EXPECT_THAT(saving.saves_after[0].block_ids, ElementsAre(ElementsAre(1, 2, 3, 4), ElementsAre(101, 102)));
  add("b", 80);
  EXPECT_EQ(lookup("b", 32).num_external, 32u);
  core_->allocated(RequestId{"b"}, 32, {{1, 2, 7, 8}, {0, 108}}, now_);
  const StepPlan loading = build();
  ASSERT_THAT(loading.loads, SizeIs(1));
  EXPECT_THAT(loading.loads[0].block_ids, ElementsAre(ElementsAre(7, 8), ElementsAre(108)));
  EXPECT_EQ(loading.loads[0].items[0].first_token, 0u);
}

class UnlikeWindows : public Windows {
 protected:
  UnlikeWindows() : Windows({{kBlock}, {kBlock, kWindow}, {kBlock, 2 * kWindow}}) {}
  /// As prefill_in_two_steps(), for three groups.
  ChunkMeta second_chunk() {
    const BlockTable whole = {blocks(1, 9), blocks(101, 9), blocks(201, 9)};
    add("a", 130);
    lookup("a");
    core_->allocated(RequestId{"a"}, 0, whole, now_);
    build({{{RequestId{"a"}, 0, 120, whole}}, {}});
    const StepPlan plan = build({{{RequestId{"a"}, 120, 10, std::nullopt}}, {}});
    return core_->pool().slot(plan.saves_after.at(0).items.at(0).chunk.slot).meta;
  }
};

TEST_F(UnlikeWindows, AHitEndsWhereEachGroupsOwnWindowIsThere) {
  const ChunkMeta chunk = second_chunk();
  EXPECT_EQ(chunk.window_from, 32u);
  EXPECT_THAT(chunk.windows_from, ElementsAre(0, 32, 0));
  add("b", 140);
  EXPECT_EQ(lookup("b").num_external, 128u);  // group 1 is needed from token 96 on, group 2 from token 80 on
}

TEST_F(UnlikeWindows, ALeaseTellsWhatEachGroupLacks) {
  const ChunkMeta chunk = second_chunk();
  const LeaseReply reply = core_->lease_requested("x", {"model", {chunk.key}, ""}, now_);
  ASSERT_THAT(reply.chunks, SizeIs(1));
  EXPECT_THAT(reply.chunks[0].windows_from, ElementsAre(0, 32, 0));
}

TEST_F(UnlikeWindows, AHoldersWindowsOfAnotherModelAreNotBelieved) {
  core_->set_directory_up(true);
  add("a", 140);
  const auto query = std::get<QueryDirectory>(core_->take_actions().at(0));
  core_->directory_answered(query.fetch, {{"tcp://e:1", 2, {}}}, now_);
  const auto wanted = std::get<RequestLease>(core_->take_actions().at(0));
  const auto with = [](std::uint32_t index, std::vector<std::uint32_t> windows_from) {
    return LeasedChunk{index, {index, 1}, kChunk, {5}, 32, {}, {}, 0, std::move(windows_from)};
  };
  core_->lease_answered(wanted.fetch, wanted.endpoint, {7, "", {with(0, {0, 32}), with(1, {0, 33, 0})}}, now_);
  for (const Action& action : core_->take_actions()) EXPECT_FALSE(std::holds_alternative<StartPull>(action));
}

class RestartingWindows : public Windows {
 protected:
  RestartingWindows() : Windows({{kBlock}, {kBlock, 2 * kBlock, true}}) {}
};

TEST_F(RestartingWindows, AttendToTheTokensSinceTheLastMultipleOfTheirSize) {
  const StepPlan plan = prefill_in_two_steps("a");
  ASSERT_THAT(plan.saves_after, SizeIs(1));  // in a step that began at token 120, whose window begins at token 96
  EXPECT_THAT(plan.saves_after[0].block_ids[1], ElementsAre(kNoBlock, kNoBlock, 107, 108));
  add("b", 140);
  EXPECT_EQ(lookup("b", 64).num_external, 64u);  // token 128 attends to itself alone
  core_->allocated(RequestId{"b"}, 64, table(8, 8), now_);
  const StepPlan loading = build();
  ASSERT_THAT(loading.loads, SizeIs(1));
  EXPECT_THAT(loading.loads[0].block_ids[1], ElementsAre(kNoBlock, kNoBlock, kNoBlock, kNoBlock));
}

class AsyncLoads : public Windows {
 protected:
  AsyncLoads() {
    prefill_in_two_steps("a");
    core_->finished(RequestId{"a"}, 130, table(9), false, now_);
    build();
    add("b", 140);
    EXPECT_EQ(lookup("b").num_external, 128u);
    core_->allocated(RequestId{"b"}, 128, table(9, 6), now_);
    plan_ = core_->build_step({}, now_ += kMillisecond);
  }
  WorkerReport failed(bool with_corrupt_chunk) const {
    WorkerReport report = well_done(plan_);
    report.loads[0].tokens_loaded = 0;
    if (with_corrupt_chunk) report.loads[0].corrupt = {plan_.loads[0].items[1].chunk};
    return report;
  }
  StepPlan plan_;
};

TEST_F(AsyncLoads, OneAdmissionIsAllocatedTwiceAndCountedOnce) {
  ASSERT_THAT(plan_.loads, SizeIs(1));
  EXPECT_TRUE(plan_.loads[0].is_async);
  core_->worker_report(well_done(plan_), now_);
  EXPECT_EQ(core_->counters().hit_tokens, 128u);
  core_->allocated(RequestId{"b"}, 0, table(9, 6), now_);
  build({{{RequestId{"b"}, 128, 12, table(9, 6)}}, {}});
  const FinishedRequest done = core_->finished(RequestId{"b"}, 140, table(9, 7), false, now_);
  ASSERT_THAT(done.admissions, SizeIs(1));
  EXPECT_EQ(done.admissions[0].loaded, 128u);
  EXPECT_EQ(core_->counters().hit_tokens, 128u);
  build();
  EXPECT_EQ(core_->pool().num_pins(), 0u);
}

TEST_F(AsyncLoads, AFailedLoadIsLookedUpAgainWithoutTheDamagedChunk) {
  core_->worker_report(failed(true), now_);
  EXPECT_EQ(lookup("b").num_external, 64u);
}

TEST_F(AsyncLoads, WhatFailedWithoutADamagedChunkIsNotAskedForAgain) {
  core_->worker_report(failed(false), now_);
  EXPECT_EQ(lookup("b").num_external, 0u);
  core_->allocated(RequestId{"b"}, 0, table(9), now_);
  EXPECT_THAT(build({{{RequestId{"b"}, 0, 140, table(9)}}, {}}).saves_after, IsEmpty());
}

TEST_F(AsyncLoads, AnAbortInBetweenLeavesTheReportItsLoad) {
  core_->finished(RequestId{"b"}, 128, table(9, 6), true, now_);
  EXPECT_EQ(core_->pool().num_pins(), 1u);
  core_->worker_report(well_done(plan_), now_);
  EXPECT_EQ(core_->pool().num_pins(), 0u);
}

TEST_F(AsyncLoads, AnAbortSavesNothingOfBlocksThatAreStillLoaded) {
  core_->finished(RequestId{"b"}, 128, table(9, 6), false, now_);
  EXPECT_THAT(build().saves_before, IsEmpty());
}

}  // namespace
}  // namespace kvferry::sim
