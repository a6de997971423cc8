// Tests that a handoff is excused only by a mishap to its own chunk, at its own two nodes, during the handoff.
#include "handoffs.h"

#include <gtest/gtest.h>

namespace kvferry::sim {
namespace {

constexpr std::size_t kPrefill = 0, kDecode = 1, kOther = 2;
constexpr TimeNs kAsked = 1 * kSecond, kHanded = 2 * kSecond, kAdmitted = 3 * kSecond;
constexpr TimeNs kBefore = kHanded - kMillisecond, kOnTheWay = kHanded + kMillisecond, kAfter = kAdmitted + kSecond;

ChunkKey key(std::uint8_t first) {
  ChunkKey key;
  key.bytes[0] = first;
  return key;
}

class Excuses : public ::testing::Test {
 protected:
  Excuses() {
    handoff_.from = kPrefill;
    handoff_.to = kDecode;
    handoff_.asked = kAsked;
    handoff_.handed = kHanded;
    for (const std::uint8_t chunk : {1, 2}) handoff_.chunks.push_back({key(chunk), 4, false, {}});
    handoff_.at_prefill = {AtPrefill::kThere, AtPrefill::kThere};
  }
  /// Returns what excuses chunk 0 after one mishap to the chunk with this key.
  Mishaps::Kind after(Mishaps::Kind kind, std::size_t node, std::uint8_t chunk, TimeNs when, TimeNs lasts = 0) const {
    Mishaps mishaps;
    const ChunkKey touched = key(chunk);
    mishaps.to_chunks(kind, node, {&touched, 1}, when, when + lasts);
    return mishaps.excuse(handoff_, 0, kAdmitted);
  }
  Mishaps::Kind after_link(Mishaps::Kind kind, std::size_t node, std::size_t other, TimeNs when) const {
    Mishaps mishaps;
    mishaps.to_link(kind, node, other, when);
    return mishaps.excuse(handoff_, 0, kAdmitted);
  }
  Handoff handoff_;
};

TEST_F(Excuses, WithoutAMishapThereIsNone) { EXPECT_EQ(Mishaps().excuse(handoff_, 0, kAdmitted), nullptr); }

TEST_F(Excuses, AChunkIsExcusedByItsOwnMishapsAtItsTwoNodesOnItsWay) {
  for (const std::size_t node : {kPrefill, kDecode})
    EXPECT_EQ(after(&Tally::excused_evicted, node, 1, kOnTheWay), &Tally::excused_evicted);
  EXPECT_EQ(after(&Tally::excused_evicted, kDecode, 2, kOnTheWay), nullptr) << "another chunk's";
  EXPECT_EQ(after(&Tally::excused_evicted, kOther, 1, kOnTheWay), nullptr) << "at another node";
  EXPECT_EQ(after(&Tally::excused_evicted, kPrefill, 1, kBefore), nullptr) << "and yet it was there";
  EXPECT_EQ(after(&Tally::excused_evicted, kDecode, 1, kAfter), nullptr) << "after the admission";
}

TEST_F(Excuses, WhatIsOnItsWayCountsOnlyWhenTheLongestWaitIsOver) {
  handoff_.longest_wait = kAdmitted - kHanded;
  const auto on_its_way = [&](TimeNs end) {
    return after(&Tally::excused_time_over, kDecode, 1, kOnTheWay, end - kOnTheWay);
  };
  EXPECT_EQ(on_its_way(kAfter), &Tally::excused_time_over);
  EXPECT_EQ(on_its_way(kAdmitted - kMillisecond), nullptr) << "it had arrived";
  handoff_.longest_wait = kAfter - kHanded;
  EXPECT_EQ(on_its_way(kAfter), nullptr) << "the decode node could have waited";
}

TEST_F(Excuses, AChunkMayWaitBehindALateOneOfItsPrompt) {
  for (const Mishaps::Kind kind : {&Tally::excused_late, &Tally::excused_blocked}) {
    EXPECT_EQ(after(kind, kDecode, 2, kOnTheWay), &Tally::excused_behind);
    EXPECT_EQ(after(kind, kPrefill, 2, kOnTheWay), nullptr) << "the decode node waited for nothing";
    EXPECT_EQ(after(kind, kDecode, 3, kOnTheWay), nullptr) << "another prompt's";
  }
}

TEST_F(Excuses, AChunkThatWasNeverThereIsExcusedByWhatHappenedAtThePrefillNode) {
  handoff_.at_prefill[0] = AtPrefill::kMissing;
  EXPECT_EQ(after(&Tally::excused_save_failed, kPrefill, 1, kBefore), &Tally::excused_save_failed);
  EXPECT_EQ(after(&Tally::excused_save_failed, kPrefill, 1, kAsked - 1), nullptr) << "before its prefill";
  EXPECT_EQ(after(&Tally::excused_lost, kDecode, 1, kOnTheWay), nullptr) << "nothing was to be had";
  EXPECT_EQ(after_link(&Tally::excused_no_slot, kPrefill, kPrefill, kBefore), &Tally::excused_no_slot);
  EXPECT_EQ(after_link(&Tally::excused_no_slot, kDecode, kDecode, kOnTheWay), nullptr);
}

TEST_F(Excuses, AChunkThatThePrefillNodePullsIsExcused) {
  handoff_.at_prefill[1] = AtPrefill::kPulled;
  EXPECT_EQ(Mishaps().excuse(handoff_, 0, kAdmitted), nullptr) << "another chunk's";
  EXPECT_EQ(Mishaps().excuse(handoff_, 1, kAdmitted), &Tally::excused_pulled);
}

TEST_F(Excuses, AChunkWhoseSaveAtThePrefillNodeIsFailingIsExcused) {
  handoff_.at_prefill = {AtPrefill::kMissing, AtPrefill::kFailing};
  EXPECT_EQ(Mishaps().excuse(handoff_, 0, kAdmitted), nullptr) << "another chunk's";
  EXPECT_EQ(Mishaps().excuse(handoff_, 1, kAdmitted), &Tally::excused_save_failed);
}

TEST_F(Excuses, ANodesMishapsCountAtTheTwoNodes) {
  for (const std::size_t node : {kPrefill, kDecode})
    EXPECT_EQ(after_link(&Tally::excused_died, node, node, kOnTheWay), &Tally::excused_died);
  EXPECT_EQ(after_link(&Tally::excused_died, kOther, kOther, kOnTheWay), nullptr);
  EXPECT_EQ(after_link(&Tally::excused_died, kPrefill, kPrefill, kBefore), nullptr);
  EXPECT_EQ(after_link(&Tally::excused_no_slot, kDecode, kDecode, kOnTheWay), &Tally::excused_no_slot);
  EXPECT_EQ(after_link(&Tally::excused_no_slot, kPrefill, kPrefill, kOnTheWay), nullptr) << "it had the chunk";
}

TEST_F(Excuses, ASuspicionCountsBetweenTheTwoNodesAndWhileItLasts) {
  EXPECT_EQ(after_link(&Tally::excused_suspected, kDecode, kPrefill, kOnTheWay), &Tally::excused_suspected);
  EXPECT_EQ(after_link(&Tally::excused_suspected, kPrefill, kDecode, kOnTheWay), nullptr);
  EXPECT_EQ(after_link(&Tally::excused_suspected, kDecode, kOther, kOnTheWay), nullptr);
  handoff_.is_suspect = true;
  EXPECT_EQ(Mishaps().excuse(handoff_, 0, kAdmitted), &Tally::excused_suspected);
}

TEST_F(Excuses, WhatBeganBeforeTheHandOverCountsIfItLasts) {
  EXPECT_EQ(after(&Tally::excused_late, kDecode, 1, kBefore, kSecond), &Tally::excused_late);
  EXPECT_EQ(after(&Tally::excused_late, kDecode, 1, kAsked, kMillisecond), nullptr);
  EXPECT_EQ(after(&Tally::excused_late, kDecode, 1, kAfter, kSecond), nullptr);
}

}  // namespace
}  // namespace kvferry::sim
