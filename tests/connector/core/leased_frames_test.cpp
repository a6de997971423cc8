#include "connector/core/leased_frames.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "check_throws.h"

namespace kvferry::sim {
namespace {

using ::testing::ElementsAre;
using FrameState = FrameTable::State;

class FramesOfLeases : public ::testing::Test {
 protected:
  FramesOfLeases() {
    for (std::uint32_t slot = 0; slot < 4; ++slot) {
      const FrameTable::Reserved reserved = table_.reserve({slot, 1}, FrameState::kFillingFromSlot, "test").value();
      table_.filled(reserved.frame);
      table_.unpin(reserved.pin);
    }
  }
  /// Returns how many frames can be had for other chunks.
  std::size_t num_free() {
    std::vector<FrameTable::Reserved> all;
    while (const auto one =
               table_.reserve({100 + static_cast<std::uint32_t>(all.size()), 1}, FrameState::kLanding, "x"))
      all.push_back(*one);
    for (const FrameTable::Reserved& one : all) {
      table_.drop(one.frame);
      table_.unpin(one.pin);
    }
    return all.size();
  }
  ChecksThrow checks_;
  FrameTable table_{4};
  LeasedFrames leased_{table_};
};

TEST_F(FramesOfLeases, ArePinnedUntilTheLeaseEndsOrItsTimeHasPassed) {
  const std::uint32_t frame = table_.find({2, 1})->frame, other = table_.find({3, 1})->frame;
  EXPECT_THAT(leased_.begin(7, std::vector<ChunkRef>{{2, 1}}, 100), ElementsAre(frame));
  EXPECT_THAT(leased_.begin(8, std::vector<ChunkRef>{{3, 1}}, 200), ElementsAre(other));
  EXPECT_EQ(num_free(), 2u);
  EXPECT_EQ(table_.find({2, 1})->frame, frame) << "a reader may be reading it";
  leased_.end(7);
  leased_.end(7);  // a release that comes twice
  EXPECT_EQ(num_free(), 3u);
  leased_.expire(199);
  EXPECT_EQ(num_free(), 3u);
  leased_.expire(200);
  EXPECT_EQ(num_free(), 4u);
  leased_.end(8);
  EXPECT_EQ(leased_.num_pinned(), 0u);
  EXPECT_TRUE(table_.pins().empty());
}

TEST_F(FramesOfLeases, AreThoseOfExactlyTheLeasedChunks) {
  table_.drop_slot(0);
  const auto unfinished = table_.reserve({0, 2}, FrameState::kLanding, "x").value();
  EXPECT_THAT(leased_.begin(7, std::vector<ChunkRef>{{0, 1}, {0, 2}, {1, 2}, {9, 1}}, 100),
              ElementsAre(kNoFrame, kNoFrame, kNoFrame, kNoFrame));
  EXPECT_EQ(leased_.num_pinned(), 0u);
  table_.unpin(unfinished.pin);
}

TEST_F(FramesOfLeases, AreAlsoThoseThatAreBeingCopiedToTheirSlotsOnceTheyAreVerified) {
  table_.drop_slot(0);
  const auto saved = table_.reserve({0, 2}, FrameState::kGathering, "x").value();
  const auto leased = [&] { return leased_.begin(7, std::vector<ChunkRef>{{0, 2}}, 100).at(0); };
  table_.filled(saved.frame);
  table_.write_back_started(saved.frame);
  EXPECT_EQ(leased(), kNoFrame) << "the GPU may still write the frame";
  table_.hashed(saved.frame, 5);
  EXPECT_EQ(leased(), saved.frame.frame);
  table_.drop(saved.frame);  // the copy to the slot has failed
  table_.unpin(saved.pin);
  EXPECT_EQ(num_free(), 3u) << "a reader may be reading it";
  leased_.end(7);
  EXPECT_EQ(num_free(), 4u);
}

TEST_F(FramesOfLeases, AreThoseOfGrowingChunksForWhoKnowsThatTheyGrow) {
  table_.drop_slot(0);
  const auto saved = table_.reserve({0, 2}, FrameState::kGathering, "x").value();
  const auto landing = table_.reserve({9, 1}, FrameState::kLanding, "x").value();
  const auto leased = [&](bool is_growing) {
    return leased_.begin(7, std::vector<ChunkRef>{{0, 2}, {9, 1}}, 100, {is_growing, is_growing});
  };
  EXPECT_THAT(leased(false), ElementsAre(kNoFrame, kNoFrame));
  EXPECT_THAT(leased(true), ElementsAre(saved.frame.frame, kNoFrame)) << "a landing is no save";
  table_.drop(saved.frame);  // the save has failed
  table_.unpin(saved.pin);
  table_.unpin(landing.pin);
  EXPECT_EQ(num_free(), 2u) << "a reader may be reading it";
  leased_.end(7);
  EXPECT_EQ(num_free(), 3u);
}

TEST_F(FramesOfLeases, KeepTheirBytesWhenTheSlotGetsAnotherChunk) {
  const std::uint32_t frame = leased_.begin(7, std::vector<ChunkRef>{{2, 1}}, 100).at(0);
  table_.drop_slot(2);
  EXPECT_FALSE(table_.find({2, 1}));
  EXPECT_EQ(num_free(), 3u);
  for (std::uint32_t i = 0; i < 3; ++i) {
    const auto got = table_.reserve({50 + i, 1}, FrameState::kLanding, "x").value();
    EXPECT_NE(got.frame.frame, frame);
  }
  leased_.end(7);
  EXPECT_EQ(table_.reserve({60, 1}, FrameState::kLanding, "x")->frame.frame, frame);
}

TEST_F(FramesOfLeases, LeaveAFrameForSavesAndLoads) {
  const auto frames = leased_.begin(7, std::vector<ChunkRef>{{0, 1}, {1, 1}, {2, 1}, {3, 1}}, 100);
  EXPECT_NE(frames[2], kNoFrame);
  EXPECT_EQ(frames[3], kNoFrame);
  EXPECT_THAT(leased_.begin(8, std::vector<ChunkRef>{{3, 1}}, 100), ElementsAre(kNoFrame));
  leased_.begin(7, std::vector<ChunkRef>{{0, 1}}, 100);  // the same lease again
  EXPECT_EQ(leased_.num_pinned(), 1u);
}

}  // namespace
}  // namespace kvferry::sim
