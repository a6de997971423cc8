// Tests what only the GPU store does: its tiers, deadlines and fences, and its behaviour if the GPU refuses calls.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/connector/runtime/test_store.h"
#include "transport/base/checksum.h"

namespace kvferry {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Ne;

TEST(GpuStore, DescribesItsTiers) {
  EXPECT_EQ(TestStore({StoreKind::kGpu}).store->describe(), "GPU tier: 3 frames of 2.0 KiB on simulated GPU");
  EXPECT_THAT(TestStore({StoreKind::kGpuWhereChunksLand}).store->describe(),
              HasSubstr("chunks from other nodes are written to these frames"));
  EXPECT_THAT(TestStore({StoreKind::kGpuWithoutFrames}).store->describe(), HasSubstr("GPU tier: none"));
  EXPECT_EQ(TestStore({StoreKind::kHost}).store->describe(), "");
}

class MakingAStore : public ::testing::Test {
 protected:
  Result<std::unique_ptr<ChunkStore>> make(std::uint64_t bytes, bool lands = false) {
    ChunkStoreParts parts{engine_.layouts(), 0, pool_, engine_.chunk_bytes(), RegionId{1}};
    return make_gpu_store(std::move(parts), {make_sim_gpu(device_), bytes, lands, TestStore::kTimeout, clock_, book_});
  }
  std::shared_ptr<SimDevice> device_ = std::make_shared<SimDevice>(1);
  ToyEngine engine_{device_.get()};
  std::vector<std::byte> pool_ = std::vector<std::byte>(4 * engine_.chunk_bytes());
  ManualClock clock_;
  StillTransport book_;
};

TEST_F(MakingAStore, FramesThatHoldNoChunkAreAnError) {
  const auto store = make(100);
  ASSERT_FALSE(store);
  EXPECT_EQ(store.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(store.error().what, HasSubstr("gpu_pool_bytes 100"));
}

TEST_F(MakingAStore, WhateverIsRefusedNothingIsLeftBehind) {
  bool was_made = false;
  for (int granted = 0; !was_made; ++granted) {
    ASSERT_LT(granted, 20);
    // SimDevice refuses one call. Each turn grants one call more before it, so that every call is refused once.
    SimDevice& device = *device_;
    device.refuse_next(0);
    device.refuse_after(granted, 1);
    was_made = static_cast<bool>(make(8 * 2048, true));
    device.refuse_next(0);
    EXPECT_EQ(device.num_alive(), 1u) << granted;  // only the engine's stream is left
    EXPECT_EQ(book_.num_regions(), 0u);
  }
}

TEST_F(MakingAStore, WhereTheTransportCantReachTheGpuChunksLandInSlots) {
  book_.takes_devices = false;
  const auto store = make(8 * 2048, true).value();
  EXPECT_EQ(store->land({2, 1}, 10)->region, RegionId{1});
  EXPECT_EQ(store->land({2, 2}, 10)->offset, 2 * engine_.chunk_bytes());
}

class LateGpu : public ::testing::Test {
 protected:
  LateGpu() {
    test_.engine.overwrite(3, 1);
    test_.run();
  }
  TestStore test_{{StoreKind::kGpu, 1}};
};

TEST_F(LateGpu, ASaveIsToldWhenItsSlotIsWrittenAndNotBefore) {
  test_.save({save_job("r", {0, 1}, {3}, 4)});
  EXPECT_THAT(test_.store->take_saved(), IsEmpty());
  test_.run();
  const auto done = test_.store->take_saved();
  ASSERT_EQ(done.size(), 1u);
  EXPECT_TRUE(done[0].ok);
}

TEST_F(LateGpu, ASaveIsToldInItsFrameAndLoadedFromItBeforeItsSlotIsWritten) {
  const std::vector<std::vector<BlockId>> table = {{3}};
  const std::vector<std::byte> want = test_.engine.expected({0, 4, table});
  test_.device->hold_copies_to_host(true);
  test_.save({save_job("r", {0, 1}, {3}, 4)});
  EXPECT_THAT(test_.store->pin_frames(7, std::vector<ChunkRef>{{0, 1}}, kSecond), ElementsAre(kNoFrame));
  test_.run();
  auto done = test_.store->take_saved();
  ASSERT_EQ(done.size(), 1u);
  EXPECT_TRUE(done[0].ok && done[0].is_in_frame);
  EXPECT_EQ(done[0].checksum, chunk_checksum(want));
  EXPECT_FALSE(std::ranges::equal(test_.slot(0, want.size()), want));
  EXPECT_THAT(test_.store->take_saved(), IsEmpty());
  EXPECT_EQ(test_.load({load_job("l", {0, 1}, done[0].checksum, 4, {5}, 4)})[0].tokens_loaded, 4u);
  EXPECT_THAT(test_.store->pin_frames(7, std::vector<ChunkRef>{{0, 1}}, kSecond), ElementsAre(Ne(kNoFrame)));
  test_.device->hold_copies_to_host(false);
  done = test_.all_saved();
  ASSERT_EQ(done.size(), 1u);
  EXPECT_TRUE(done[0].ok && !done[0].is_in_frame);
  EXPECT_EQ(done[0].checksum, chunk_checksum(want));
  EXPECT_TRUE(std::ranges::equal(test_.slot(0, want.size()), want));
}

TEST_F(LateGpu, ASaveThatWasToldInItsFrameFailsAtItsDeadlineAndIsNotLoadedFromItsSlot) {
  test_.device->hold_copies_to_host(true);
  test_.save({save_job("r", {0, 1}, {3}, 4)});
  const auto early = test_.all_saved();
  ASSERT_EQ(early.size(), 1u);
  ASSERT_TRUE(early[0].is_in_frame);
  test_.clock.advance(TestStore::kTimeout);
  const auto done = test_.store->take_saved();
  ASSERT_EQ(done.size(), 1u);
  EXPECT_FALSE(done[0].ok || done[0].is_in_frame);
  EXPECT_EQ(test_.store->num_fenced(), 1u);
  const auto outcome = test_.load({load_job("l", {0, 1}, early[0].checksum, 4, {5}, 4)}).at(0);
  EXPECT_EQ(outcome.tokens_loaded, 0u);
  EXPECT_THAT(outcome.corrupt, IsEmpty()) << "its bytes were not read";
  test_.device->hold_copies_to_host(false);
  EXPECT_THAT(test_.all_saved(), IsEmpty());
  EXPECT_EQ(test_.store->num_fenced(), 0u);
}

TEST_F(LateGpu, AfterTheDeadlineASaveHasFailedAndItsSlotIsFenced) {
  test_.save({save_job("r", {0, 1}, {3}, 4)});
  test_.clock.advance(TestStore::kTimeout - 1);
  EXPECT_THAT(test_.store->take_saved(), IsEmpty());
  test_.clock.advance(1);
  auto done = test_.store->take_saved();
  ASSERT_EQ(done.size(), 1u);
  EXPECT_FALSE(done[0].ok);
  EXPECT_EQ(test_.store->num_fenced(), 1u);
  // The scheduler uses the slot again.
  EXPECT_EQ(test_.store->land({0, 2}, 10).error().code, ErrorCode::kFull);
  test_.save({save_job("r", {0, 3}, {3}, 4)});
  done = test_.store->take_saved();
  ASSERT_EQ(done.size(), 1u);
  EXPECT_FALSE(done[0].ok);
  EXPECT_EQ(done[0].chunk, (ChunkRef{0, 3}));
  test_.run();
  EXPECT_THAT(test_.store->take_saved(), IsEmpty());
  EXPECT_EQ(test_.store->num_fenced(), 0u);
  test_.save({save_job("r", {0, 4}, {3}, 4)});
  EXPECT_TRUE(test_.all_saved().at(0).ok);
}

TEST_F(LateGpu, WhatWasVerifiedIsNotHashedAgain) {
  test_.save({save_job("r", {0, 1}, {3}, 4)});
  const std::uint64_t sum = test_.all_saved().at(0).checksum;
  const std::uint64_t before = num_passes_hashed();
  EXPECT_EQ(test_.load({load_job("l", {0, 1}, sum, 4, {5}, 4)})[0].tokens_loaded, 4u);
  EXPECT_EQ(num_passes_hashed(), before);
}

TEST_F(LateGpu, RefusalsAtEveryCallOfASaveAndALoadLeaveNothingBehind) {
  for (int turn = 0; turn < 100; ++turn) {
    const int granted = turn / 2;
    TestStore test{{.kind = StoreKind::kGpuWhereChunksLand,
                    .seed = static_cast<std::uint32_t>(granted),
                    .has_unlike_layers = turn % 2 == 1}};
    test.engine.overwrite(3, 1);
    test.save({save_job("r", {0, 1}, {3}, 4)});
    const std::uint64_t sum = test.all_saved().at(0).checksum;
    for (std::uint32_t slot : {1u, 2u, 3u}) {  // fill the frames with other chunks
      test.save({save_job("r", {slot, 1}, {3}, 4)});
      test.all_saved();
    }
    test.device->refuse_after(granted, 1);
    test.begin_load({load_job("l", {0, 1}, sum, 4, {5}, 4), load_job("l", {3, 1}, sum, 4, {6}, 4)});
    test.save({save_job("r", {4, 1}, {3}, 4), save_job("r", {5, 1}, {3}, 4)});
    test.all_saved();
    test.device->refuse_next(0);
    test.all_saved();
    test.all_saved();
    EXPECT_EQ(test.store->num_fenced(), 0u) << granted;
    test.store.reset();
    EXPECT_EQ(test.device->num_alive(), 1u) << granted;
  }
}

TEST(GpuStore, AFailedLoadCostsNoFrame) {
  for (int granted = 0; granted < 15; ++granted) {
    TestStore test{{StoreKind::kGpu, 1, 6, 1}};
    const auto saved = [&](ChunkRef chunk) {
      test.engine.overwrite(3, chunk.slot);
      test.save({save_job("r", chunk, {3}, 4)});
      return test.all_saved().at(0).checksum;
    };
    const std::uint64_t first = saved({0, 1});
    saved({1, 1});  // pushes the first chunk out of the only frame
    test.device->refuse_after(granted, 1);
    test.begin_load({load_job("l", {0, 1}, first, 4, {5}, 4)});
    test.device->refuse_next(0);
    for (int i = 0; i < 2; ++i) test.all_loaded();
    const std::uint64_t second = saved({2, 1});
    const std::uint64_t before = num_passes_hashed();
    EXPECT_EQ(test.load({load_job("l", {2, 1}, second, 4, {5}, 4)})[0].tokens_loaded, 4u);
    EXPECT_EQ(num_passes_hashed(), before) << granted;  // the chunk was loaded from the frame
  }
}

/// The GPU has already got some work when the next call is refused. This work still runs later.
class RefusedHalfway : public ::testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  TestStore made(std::uint32_t seed) const {
    return TestStore({StoreKind::kGpu, seed, 6, 1, std::get<bool>(GetParam())});
  }
  int num_granted() const { return std::get<int>(GetParam()); }
};

TEST_P(RefusedHalfway, ASaveKeepsItsSlotFromOthers) {
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    TestStore test = made(seed);
    test.engine.overwrite(3, 1);
    test.device->refuse_after(num_granted(), 1);
    test.save({save_job("r", {0, 1}, {3}, 4)});
    test.device->refuse_next(0);
    for (std::uint64_t generation = 2; generation < 40; ++generation) {
      test.store->take_saved();
      if (test.store->land({0, generation}, 64)) break;
      test.device->step();
    }
    const auto slot = test.slot(0, 64);
    std::ranges::fill(slot, std::byte{7});
    const bool is_free = static_cast<bool>(test.store->land({0, 40}, 64));
    test.run();
    if (is_free) {
      ASSERT_TRUE(std::ranges::all_of(slot, [](std::byte b) { return b == std::byte{7}; })) << "seed " << seed;
    }
  }
}

TEST_P(RefusedHalfway, ALoadKeepsItsFrameFromOthers) {
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    TestStore test = made(seed);
    test.engine.overwrite(3, 1);
    test.save({save_job("r", {0, 1}, {3}, 4)});
    const std::uint64_t sum = test.all_saved().at(0).checksum;
    test.save({save_job("r", {1, 1}, {3}, 4)});  // takes the only frame
    test.all_saved();
    test.device->refuse_after(num_granted(), 1);
    test.begin_load({load_job("l", {0, 1}, sum, 4, {5}, 4)});
    test.device->refuse_next(0);
    test.engine.overwrite(6, 2);
    const std::vector<std::vector<BlockId>> table = {{6}};
    const auto want = test.engine.expected({0, 4, table});
    test.save({save_job("r", {2, 1}, {6}, 4)});
    const auto done = test.all_saved();
    ASSERT_TRUE(done.size() == 1 && done[0].ok);
    ASSERT_TRUE(std::ranges::equal(test.slot(2, want.size()), want)) << "seed " << seed;
  }
}
INSTANTIATE_TEST_SUITE_P(AtEveryCall, RefusedHalfway, ::testing::Combine(::testing::Range(0, 16), ::testing::Bool()));

TEST(GpuStore, GoesWhenTheDeviceIsThroughWithIt) {
  for (const StoreKind kind : {StoreKind::kGpuWithoutFrames, StoreKind::kGpu}) {
    const std::uint64_t early = num_passes_ended_early();
    TestStore test{{kind, 1}};
    test.save({save_job("r", {2, 1}, {3}, 4)});
    const std::uint64_t sum = test.all_saved().at(0).checksum;
    test.begin_load({load_job("l", {2, 1}, sum, 4, {5}, 4)});
    test.save({save_job("r", {0, 1}, {3}, 4), save_job("r", {1, 1}, {3}, 4)});
    test.store.reset();
    EXPECT_EQ(num_passes_ended_early(), early);
    test.pool = {};  // no work writes into this memory any more
    EXPECT_FALSE(test.device->step());
  }
}

}  // namespace
}  // namespace kvferry
