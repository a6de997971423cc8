#include "connector/core/pool/chunk_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "check_throws.h"

namespace kvferry::sim {
namespace {

using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;
using State = ChunkPool::State;

class Pool : public ::testing::Test {
 protected:
  static ChunkMeta chunk(int name) { return {root_key("chunk", std::to_string(name)), 16, false, {}}; }
  static ChunkMeta of_tenant(TenantId tenant, int name) {
    ChunkMeta meta = chunk(name);
    meta.tenant = tenant;
    return meta;
  }
  static ChunkMeta tail(int name, std::uint32_t num_tokens) {
    return {root_key("tail", std::to_string(name)), num_tokens, true, root_key("group", "")};
  }
  static ChunkRef ready(ChunkPool& pool, const ChunkMeta& meta) {
    const ChunkRef ref = pool.reserve(meta, "test").value();
    EXPECT_TRUE(pool.rank_written(ref, 0, true, 7));
    return ref;
  }
  static void ready_on_both_ranks(ChunkPool& pool, const ChunkMeta& meta) {
    const ChunkRef ref = pool.reserve(meta, "test").value();
    for (const std::uint32_t rank : {0u, 1u}) pool.rank_written(ref, rank, true, 7);
  }
  static PinId pin(ChunkPool& pool, std::vector<ChunkRef> chunks, TimeNs deadline = 100) {
    return pool.pin(std::move(chunks), "test", 0, deadline);
  }
  ChecksThrow checks_;
};

TEST_F(Pool, EvictsTheLeastRecentlyUsedAndAnnouncesItOnce) {
  ChunkPool pool(3, 1);
  const ChunkRef one = ready(pool, chunk(1));
  ready(pool, chunk(2));
  ready(pool, chunk(3));
  pool.touch(std::vector{one});
  ready(pool, chunk(4));
  EXPECT_EQ(pool.find(chunk(2).key), nullptr);
  EXPECT_NE(pool.find(chunk(1).key), nullptr);
  EXPECT_THAT(pool.take_evicted(), ElementsAre(chunk(2).key));
  EXPECT_THAT(pool.take_evicted(), ElementsAre());
}

TEST_F(Pool, AChunkInFramesIsReadyAndItsSlotIsNotReusedUntilEveryRankHasWrittenIt) {
  ChunkPool pool(1, 2);
  const ChunkRef ref = pool.reserve(chunk(1), "test").value();
  EXPECT_FALSE(pool.rank_written(ref, 0, true, 7, true));
  EXPECT_TRUE(pool.rank_written(ref, 1, true, 7, true));
  EXPECT_EQ(pool.slot(0).ranks_in_frames, 2u);
  EXPECT_FALSE(pool.slot_written(ref, 1, true)) << "rank 0 has it in its frame only";
  EXPECT_BREAKS(pool.slot_written(ref, 1, true), "exactly-once");
  EXPECT_FALSE(pool.reserve(chunk(2), "test"));
  pool.unpin(pin(pool, {ref}));
  pool.invalidate(ref);
  EXPECT_EQ(pool.slot(0).state, State::kRetired);
  EXPECT_FALSE(pool.reserve(chunk(2), "test"));
  EXPECT_FALSE(pool.slot_written(ref, 0, true)) << "it was dropped";
  EXPECT_EQ(pool.slot(0).state, State::kFree);
  EXPECT_THAT(pool.take_evicted(), ElementsAre());
}

TEST_F(Pool, AChunkWhoseSlotWasNotWrittenIsDropped) {
  ChunkPool pool(2, 2);
  // The first copy fails before the other rank has told its part of the pull, the second one after.
  const ChunkRef early = pool.reserve(chunk(1), "test").value();
  pool.rank_written(early, 0, true, 7, true);
  EXPECT_FALSE(pool.slot_written(early, 0, false));
  EXPECT_FALSE(pool.rank_written(early, 1, true, 7, true));
  EXPECT_EQ(pool.slot(early.slot).state, State::kRetired) << "rank 1 still writes the slot";
  EXPECT_FALSE(pool.slot_written(early, 1, true));
  const ChunkRef late = pool.reserve(chunk(2), "test").value();
  for (const std::uint32_t rank : {0u, 1u}) pool.rank_written(late, rank, true, 7, true);
  EXPECT_FALSE(pool.slot_written(late, 0, false));
  EXPECT_EQ(pool.find(chunk(2).key), nullptr);
  EXPECT_FALSE(pool.slot_written(late, 1, true));
  for (const std::uint32_t slot : {0u, 1u}) EXPECT_EQ(pool.slot(slot).state, State::kFree);
}

TEST_F(Pool, AChainLosesItsEndBeforeItsStart) {
  ChunkPool pool(3, 1);
  const std::vector<ChunkRef> chain = {ready(pool, chunk(1)), ready(pool, chunk(2)), ready(pool, chunk(3))};
  pool.touch(chain);
  ready(pool, chunk(4));
  ready(pool, chunk(5));
  EXPECT_THAT(pool.take_evicted(), ElementsAre(chunk(3).key, chunk(2).key));
}

MATCHER_P3(ChangeIs, key, is_ready, is_writing, "") {
  return arg.key == key && arg.is_ready == is_ready && arg.is_writing == is_writing;
}

TEST_F(Pool, ToldChangesAreTheStatesOfChunksThatCameAndWent) {
  ChunkPool pool(2, 2);
  ready_on_both_ranks(pool, chunk(1));
  EXPECT_FALSE(pool.name(pool.find(chunk(1).key)->ref));
  EXPECT_THAT(pool.take_changes().chunks, ElementsAre());  // nothing is kept before track_changes()
  pool.track_changes();
  const ChunkRef two = pool.reserve(chunk(2), "test").value();
  EXPECT_TRUE(pool.name(two));
  EXPECT_FALSE(pool.name(two));
  pool.rank_written(two, 0, true, 7);
  EXPECT_THAT(pool.take_changes().chunks, ElementsAre());  // one rank lacks the chunk
  pool.rank_written(two, 1, true, 7);
  pool.reserve(chunk(3), "test");
  EXPECT_THAT(pool.take_changes().chunks,
              ElementsAre(ChangeIs(chunk(2).key, true, false), ChangeIs(chunk(1).key, false, false)));
  pool.fail_write(pool.find(chunk(3).key)->ref);
  const ChunkRef three = pool.find(chunk(3).key)->ref;
  pool.rank_written(three, 0, true, 7);
  pool.rank_written(three, 1, true, 7);
  pool.invalidate(two);
  const ChunkRef again = pool.reserve(chunk(2), "test").value();
  EXPECT_TRUE(pool.name(again));  // another chunk than the one that was named
  EXPECT_THAT(pool.take_changes().chunks,
              ElementsAre(ChangeIs(chunk(3).key, false, false), ChangeIs(chunk(2).key, false, true)));
  EXPECT_THAT(pool.take_changes().chunks, ElementsAre());
}

TEST_F(Pool, ChangesThatNobodyTakesAreDroppedAndAllChunksTold) {
  ChunkPool pool(2, 1);
  pool.track_changes();
  for (int name = 1; name <= 100; ++name) ready(pool, chunk(name));
  const PoolChanges changes = pool.take_changes();
  EXPECT_TRUE(changes.is_all);
  EXPECT_THAT(changes.chunks,
              UnorderedElementsAre(ChangeIs(chunk(99).key, true, false), ChangeIs(chunk(100).key, true, false)));
  EXPECT_FALSE(pool.take_changes().is_all);
}

TEST_F(Pool, ADemotedChunkGoesFirst) {
  ChunkPool pool(2, 1);
  ready(pool, chunk(1));
  pool.demote(ready(pool, chunk(2)));
  ready(pool, chunk(3));
  EXPECT_THAT(pool.take_evicted(), ElementsAre(chunk(2).key));
}

TEST_F(Pool, ATenantAboveItsShareMakesRoomForOneBelow) {
  ChunkPool pool(5, 1);
  for (int name = 1; name <= 5; ++name) ready(pool, of_tenant(7, name));  // alone it may have the whole pool
  for (int name = 11; name <= 13; ++name) ready(pool, of_tenant(8, name));
  EXPECT_THAT(pool.take_evicted(), ElementsAre(chunk(1).key, chunk(2).key, chunk(3).key));
  ready(pool, of_tenant(8, 14));  // 8 has three of five slots, and 7 its share of two
  EXPECT_THAT(pool.take_evicted(), ElementsAre(chunk(11).key));
  ready(pool, of_tenant(7, 6));
  EXPECT_THAT(pool.take_evicted(), ElementsAre(chunk(12).key));
  EXPECT_EQ(pool.num_evicted_for_tenants(), 4u);
}

TEST_F(Pool, OneFurthestAboveItsShareGoesFirstAndAmongEqualsTheOneUnusedForLongest) {
  ChunkPool pool(7, 1);
  std::vector<ChunkRef> refs;
  for (const auto& [tenant, name] : {std::pair(1, 11), {1, 12}, {1, 13}, {2, 21}, {2, 22}, {3, 31}, {3, 32}})
    refs.push_back(ready(pool, of_tenant(static_cast<TenantId>(tenant), name)));
  pool.touch({&refs[3], 1});  // 2 is used, but not its second chunk
  ready(pool, of_tenant(4, 41));
  EXPECT_THAT(pool.take_evicted(), ElementsAre(chunk(11).key));
  pool.touch({&refs[1], 1});
  ready(pool, of_tenant(4, 42));  // now each of four may have one: 1, 2 and 3 have two each
  EXPECT_THAT(pool.take_evicted(), ElementsAre(chunk(31).key));
}

TEST_F(Pool, IfTheOneAboveItsShareCanNotMakeRoomNobodyBelowDoesForIt) {
  ChunkPool pool(4, 1);
  const PinId held =
      pin(pool, {ready(pool, of_tenant(1, 11)), ready(pool, of_tenant(1, 12)), ready(pool, of_tenant(1, 13))});
  ready(pool, of_tenant(2, 21));
  EXPECT_EQ(pool.reserve(of_tenant(1, 14), "test"), std::nullopt);
  EXPECT_EQ(pool.reserve(of_tenant(3, 31), "test"), std::nullopt) << "2 has its share of one";
  ready(pool, of_tenant(2, 22));  // its own chunk goes
  EXPECT_THAT(pool.take_evicted(), ElementsAre(chunk(21).key));
  pool.unpin(held);
  ready(pool, of_tenant(3, 31));
  EXPECT_THAT(pool.take_evicted(), ElementsAre(chunk(11).key));
}

TEST_F(Pool, ATenantWithoutChunksIsDropped) {
  ChunkPool pool(2, 1);
  for (int name = 1; name <= 100; ++name) ready(pool, of_tenant(static_cast<TenantId>(name), name));
  EXPECT_EQ(pool.tenants().num_tenants(), 2u);
  const PinId held = pin(pool, {pool.find(chunk(100).key)->ref});
  for (const ChunkPool::Slot* slot : pool.ready()) pool.invalidate(slot->ref);
  EXPECT_EQ(pool.tenants().num_tenants(), 1u) << "its slot is in use while it is pinned";
  pool.unpin(held);
  EXPECT_EQ(pool.tenants().num_tenants(), 0u);
  EXPECT_EQ(pool.tenants().share(5), 2u);
}

TEST_F(Pool, ATenantThatUsesNothingForLongHasNoShare) {
  ChunkPool pool(4, 1);
  pool.find_idle_tenants(kSecond, 10 * kSecond);
  const ChunkRef one = ready(pool, of_tenant(1, 11));
  ready(pool, of_tenant(2, 21));
  pool.find_idle_tenants(8 * kSecond, 10 * kSecond);
  pool.touch({&one, 1});
  ready(pool, of_tenant(3, 31));
  pool.find_idle_tenants(12 * kSecond, 10 * kSecond);
  EXPECT_EQ(pool.tenants().share(1), 2u) << "2 is idle";
  EXPECT_EQ(pool.tenants().share(2), 1u) << "if it comes back";
  for (int name = 32; name <= 34; ++name) ready(pool, of_tenant(3, name));
  EXPECT_THAT(pool.take_evicted(), ElementsAre(chunk(21).key, chunk(31).key)) << "1 has less than its share";
  pool.find_idle_tenants(30 * kSecond, 10 * kSecond);
  ready(pool, of_tenant(2, 21));
  EXPECT_THAT(pool.take_evicted(), ElementsAre(chunk(11).key)) << "of two that are idle, the one unused for longest";
}

TEST_F(Pool, SaltsThatBeginAlikeAreOneTenantIfTheProxyMadeThem) {
  EXPECT_EQ(tenant_of(""), 0u);
  EXPECT_NE(tenant_of("a"), tenant_of("b"));
  EXPECT_NE(tenant_of("a.1"), tenant_of("a.2"));
  EXPECT_EQ(tenant_of("kvferry.a.1"), tenant_of("kvferry.a.2"));
  EXPECT_NE(tenant_of("kvferry.a.1"), tenant_of("kvferry.b.1"));
  EXPECT_EQ(tenant_of("kvferry.a"), tenant_of("kvferry.a.1"));
  EXPECT_NE(tenant_of("kvferry."), 0u);
}

TEST_F(Pool, NeitherHeldNorUnfinishedChunksAreEvicted) {
  ChunkPool pool(2, 1);
  const PinId held = pin(pool, {ready(pool, chunk(1))});
  const ChunkRef writing = pool.reserve(chunk(2), "test").value();
  EXPECT_EQ(pool.reserve(chunk(3), "test"), std::nullopt);
  EXPECT_EQ(pool.num_pinned(), 1u);
  EXPECT_EQ(pool.num_writing(), 1u);
  pool.unpin(held);
  EXPECT_NE(pool.reserve(chunk(3), "test"), std::nullopt);
  EXPECT_TRUE(pool.rank_written(writing, 0, true, 7));
}

TEST_F(Pool, AHoldEndsAtItsDeadlineAndNamesItsOwner) {
  ChunkPool pool(1, 1);
  const PinId held = pool.pin({ready(pool, chunk(1))}, "the reader", 0, 100);
  EXPECT_THAT(pool.expire_pins(99), ElementsAre());
  EXPECT_TRUE(pool.pinned(held));
  EXPECT_THAT(pool.expire_pins(100), ElementsAre("the reader"));
  EXPECT_FALSE(pool.unpin(held));
  EXPECT_EQ(pool.num_pinned(), 0u);
}

TEST_F(Pool, ACondemnedChunkIsFoundNoMoreButStaysForItsReaders) {
  ChunkPool pool(1, 1);
  const ChunkRef ref = ready(pool, chunk(1));
  const PinId first = pin(pool, {ref}), second = pin(pool, {ref});
  pool.invalidate(ref);
  EXPECT_EQ(pool.find(chunk(1).key), nullptr);
  EXPECT_THAT(pool.take_evicted(), ElementsAre(chunk(1).key));
  EXPECT_EQ(pool.slot(ref.slot).state, State::kRetired);
  pool.unpin(first);
  EXPECT_EQ(pool.reserve(chunk(2), "test"), std::nullopt);
  pool.unpin(second);
  const ChunkRef next = pool.reserve(chunk(2), "test").value();
  EXPECT_EQ(next.slot, ref.slot);
  EXPECT_GT(next.generation, ref.generation);
  pool.invalidate(ref);  // an old reference does not invalidate the new chunk
  EXPECT_NE(pool.find(chunk(2).key), nullptr);
}

TEST_F(Pool, IsReadyWhenAllRanksWroteAndFreeWhenOneFailed) {
  ChunkPool pool(2, 2);
  const ChunkRef good = pool.reserve(chunk(1), "test").value();
  EXPECT_FALSE(pool.rank_written(good, 1, true, 11));
  EXPECT_EQ(pool.find(chunk(1).key)->state, State::kWriting);
  EXPECT_TRUE(pool.rank_written(good, 0, true, 10));
  EXPECT_THAT(pool.find(chunk(1).key)->checksums, ElementsAre(10, 11));
  const ChunkRef bad = pool.reserve(chunk(2), "test").value();
  EXPECT_FALSE(pool.rank_written(bad, 0, false, 0));
  EXPECT_FALSE(pool.rank_written(bad, 1, true, 21));
  EXPECT_EQ(pool.find(chunk(2).key), nullptr);
  EXPECT_EQ(pool.num_writing(), 0u);
  EXPECT_THAT(pool.take_evicted(), ElementsAre());  // the chunk was never published, so its eviction is not reported
}

TEST_F(Pool, ARankThatReportsTwiceIsCaughtBeforeAnotherOnesShareIsMissing) {
  ChunkPool pool(1, 2);
  const ChunkRef ref = pool.reserve(chunk(1), "test").value();
  pool.rank_written(ref, 0, true, 10);
  EXPECT_BREAKS(pool.rank_written(ref, 0, true, 10), "exactly-once");
  EXPECT_EQ(pool.find(chunk(1).key)->state, State::kWriting);
}

TEST_F(Pool, ASpoiltWriteCountsAsFailedHoweverItEnds) {
  ChunkPool pool(1, 1);
  const ChunkRef ref = pool.reserve(chunk(1), "test").value();
  pool.fail_write(ref);
  EXPECT_FALSE(pool.rank_written(ref, 0, true, 10));
  EXPECT_EQ(pool.find(chunk(1).key), nullptr);
  EXPECT_NE(pool.reserve(chunk(1), "test"), std::nullopt);
}

TEST_F(Pool, AHeldWriteThatFailsIsFreeWhenTheHoldEnds) {
  ChunkPool pool(1, 1);
  const ChunkRef ref = pool.reserve(chunk(1), "test").value();
  const PinId held = pin(pool, {ref});  // a handoff also pins chunks that are still being saved
  pool.rank_written(ref, 0, false, 0);
  EXPECT_EQ(pool.slot(ref.slot).state, State::kRetired);
  EXPECT_EQ(pool.reserve(chunk(2), "test"), std::nullopt);
  pool.unpin(held);
  EXPECT_NE(pool.reserve(chunk(2), "test"), std::nullopt);
}

TEST_F(Pool, ListsTheNewestSixteenTailsOfAGroupAndKeepsOlderOnesByKey) {
  ChunkPool pool(20, 1);
  std::vector<ChunkRef> refs;
  for (int i = 0; i < 18; ++i) refs.push_back(ready(pool, tail(i, 17 + static_cast<std::uint32_t>(i))));
  const auto tails = pool.tails(root_key("group", ""));
  ASSERT_EQ(tails.size(), 16u);
  EXPECT_EQ(tails.front()->meta.num_tokens, 34u);
  EXPECT_EQ(tails.back()->meta.num_tokens, 19u);
  EXPECT_NE(pool.find(tail(0, 17).key), nullptr);
  pool.invalidate(refs[17]);
  pool.invalidate(refs[0]);
  EXPECT_EQ(pool.tails(root_key("group", "")).front()->meta.num_tokens, 33u);
  for (const ChunkRef ref : refs) pool.invalidate(ref);
  EXPECT_TRUE(pool.tails(root_key("group", "")).empty());
}

TEST_F(Pool, AnOldGenerationIsNeverTakenForTheNewOne) {
  ChunkPool pool(1, 1);
  const ChunkRef old = ready(pool, chunk(1));
  ready(pool, chunk(2));
  EXPECT_BREAKS(pool.touch(std::vector{old}), "generation");
  EXPECT_BREAKS(pin(pool, {old}), "generation");
  EXPECT_BREAKS(pool.rank_written(old, 0, true, 7), "generation");
  pool.demote(old);
  EXPECT_NE(pool.find(chunk(2).key), nullptr);
}

TEST_F(Pool, BreaksItsPromisesLoudly) {
  ChunkPool pool(2, 1);
  const ChunkRef ref = ready(pool, chunk(1));
  EXPECT_BREAKS(pool.rank_written(ref, 0, true, 7), "exactly-once");
  EXPECT_BREAKS(pool.reserve(chunk(1), "test"), "the pool has it already");
  EXPECT_BREAKS(pin(pool, {ref}, 0), "bounded-hold");
  EXPECT_BREAKS(pool.pin({ref}, "", 0, 100), "bounded-hold");
  EXPECT_BREAKS(pool.fail_write(ref), "is not being written");
}

}  // namespace
}  // namespace kvferry::sim
