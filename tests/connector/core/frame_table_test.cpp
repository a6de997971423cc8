#include "connector/core/frame_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "check_throws.h"

namespace kvferry::sim {
namespace {

using FrameState = FrameTable::State;
using FrameRef = FrameTable::FrameRef;

class Frames : public ::testing::Test {
 protected:
  /// Returns a clean frame with the chunk.
  static FrameRef clean(FrameTable& table, ChunkRef chunk) {
    const FrameTable::Reserved reserved = table.reserve(chunk, FrameState::kFillingFromSlot, "test").value();
    EXPECT_TRUE(table.filled(reserved.frame));
    table.unpin(reserved.pin);
    return reserved.frame;
  }
  ChecksThrow checks_;
};

TEST_F(Frames, ASavedChunkIsFoundWhenItsSlotHasItToo) {
  FrameTable table(1);
  const ChunkRef chunk{7, 1};
  const auto reserved = table.reserve(chunk, FrameState::kGathering, "save").value();
  EXPECT_FALSE(table.find(chunk));
  EXPECT_TRUE(table.filled(reserved.frame));
  EXPECT_TRUE(table.write_back_started(reserved.frame));
  EXPECT_FALSE(table.find(chunk));
  EXPECT_TRUE(table.written_back(reserved.frame));
  table.unpin(reserved.pin);
  EXPECT_EQ(table.find(chunk), reserved.frame);
  EXPECT_FALSE(table.find({7, 2}));
}

TEST_F(Frames, AVerifiedLandingIsLoadedBeforeItsSlotHasItAndIsNotReused) {
  FrameTable table(1);
  const ChunkRef chunk{7, 1};
  const auto reserved = table.reserve(chunk, FrameState::kLanding, "pull").value();
  EXPECT_TRUE(table.filled(reserved.frame));
  EXPECT_TRUE(table.write_back_started(reserved.frame));
  EXPECT_FALSE(table.find_whole(chunk)) << "its checksum is not known";
  EXPECT_TRUE(table.hashed(reserved.frame, 3));
  EXPECT_EQ(table.find_whole(chunk), reserved.frame);
  EXPECT_FALSE(table.find_whole({7, 2}));
  EXPECT_FALSE(table.find(chunk)) << "no other node reads it";
  EXPECT_FALSE(table.reserve({8, 1}, FrameState::kLanding, "pull"));
  EXPECT_TRUE(table.written_back(reserved.frame));
  table.unpin(reserved.pin);
  EXPECT_EQ(table.find_whole(chunk), reserved.frame);
  EXPECT_TRUE(table.reserve({8, 1}, FrameState::kLanding, "pull"));
}

TEST_F(Frames, TheLeastRecentlyUsedUnpinnedCleanOneGoes) {
  FrameTable table(3);
  const FrameRef one = clean(table, {1, 1});
  const FrameRef two = clean(table, {2, 1});
  clean(table, {3, 1});
  table.touch(one);
  const FramePin pin = table.pin(two, "load");
  EXPECT_TRUE(table.reserve({4, 1}, FrameState::kLanding, "pull"));
  EXPECT_FALSE(table.find({3, 1}));
  EXPECT_TRUE(table.reserve({5, 1}, FrameState::kLanding, "pull"));
  EXPECT_FALSE(table.find({1, 1}));
  EXPECT_FALSE(table.reserve({6, 1}, FrameState::kLanding, "pull"));  // one frame is pinned, and two are being written
  table.unpin(pin);
  EXPECT_TRUE(table.reserve({6, 1}, FrameState::kLanding, "pull"));
}

TEST_F(Frames, WhatIsSaidOfAnOlderUseHasNoEffect) {
  FrameTable table(1);
  const auto old = table.reserve({1, 1}, FrameState::kGathering, "save").value();
  table.drop_slot(1);
  EXPECT_FALSE(table.filled(old.frame));
  EXPECT_FALSE(table.reserve({1, 2}, FrameState::kGathering, "save"));  // the device still writes into the frame
  table.unpin(old.pin);
  const auto next = table.reserve({1, 2}, FrameState::kGathering, "save").value();
  EXPECT_FALSE(table.filled(old.frame));
  EXPECT_FALSE(table.hashed(old.frame, 3));
  table.drop(old.frame);
  EXPECT_TRUE(table.filled(next.frame));
  EXPECT_FALSE(table.frame(next.frame).checksum);
}

TEST_F(Frames, BrokenPromisesAreFound) {
  FrameTable table(2);
  const auto reserved = table.reserve({1, 1}, FrameState::kGathering, "save").value();
  EXPECT_BREAKS(table.reserve({1, 2}, FrameState::kGathering, "save"), "fenced-reuse");
  EXPECT_BREAKS(table.reserve({2, 1}, FrameState::kClean, "save"),
                "can't be reserved as clean; allowed: gathering, landing");
  EXPECT_BREAKS(table.reserve({2, 1}, FrameState::kLanding, ""), "bounded-hold");
  EXPECT_BREAKS(table.written_back(reserved.frame), "but should be writing back");
  EXPECT_BREAKS(table.write_back_started(reserved.frame), "but should be dirty");
  table.unpin(reserved.pin);
  EXPECT_BREAKS(table.unpin(reserved.pin), "exactly-once");
}

/// A simple model of the frame table with lists and without an index.
struct Naive {
  struct Entry {
    FrameState state = FrameState::kFree;
    std::uint64_t use = 0;
    ChunkRef chunk;
    std::uint32_t pins = 0;
    std::uint64_t used_at = 0;
    std::optional<std::uint64_t> checksum;
  };
  explicit Naive(std::uint32_t n) : frames(n) {}
  bool claims(const Entry& e) const { return e.state != FrameState::kFree && e.state != FrameState::kRetired; }
  Entry* of_slot(std::uint32_t slot) {
    for (Entry& e : frames)
      if (claims(e) && e.chunk.slot == slot) return &e;
    return nullptr;
  }
  Entry* current(FrameRef ref) {
    Entry& e = frames[ref.frame];
    return e.use == ref.use && claims(e) ? &e : nullptr;
  }
  void drop(Entry* e) {
    if (e != nullptr) e->state = e->pins == 0 ? FrameState::kFree : FrameState::kRetired;
  }
  /// Returns whether a reservation can succeed. Evicts a frame if necessary.
  bool make_room() {
    Entry* victim = nullptr;
    for (Entry& e : frames) {
      if (e.state == FrameState::kFree) return true;
      if (e.state == FrameState::kClean && e.pins == 0 && (victim == nullptr || e.used_at < victim->used_at))
        victim = &e;
    }
    drop(victim);
    return victim != nullptr;
  }
  std::vector<Entry> frames;
};

void walk(std::uint32_t seed) {
  std::mt19937 random(seed);
  const auto below = [&](std::size_t n) { return static_cast<std::uint32_t>(random() % n); };
  FrameTable table(1 + below(5));
  Naive naive(table.num_frames());
  struct Pinned {
    FrameRef frame;
    FramePin pin;
  };
  std::vector<Pinned> holds;
  std::vector<FrameRef> refs;  // references to frames, outdated ones too
  std::uint64_t now = 0, generation = 0;
  for (int i = 0; i < 400; ++i, ++now) {
    const std::uint32_t slot = below(8);
    const FrameRef ref = refs.empty() ? FrameRef{0, 0} : refs[below(refs.size())];
    Naive::Entry* const entry = naive.current(ref);
    switch (below(9)) {
      case 0: {
        table.drop_slot(slot);
        naive.drop(naive.of_slot(slot));
        if (below(3) == 0) break;
        constexpr FrameState kPurposes[] = {FrameState::kGathering, FrameState::kLanding, FrameState::kFillingFromSlot};
        const FrameState purpose = kPurposes[below(3)];
        const ChunkRef chunk{slot, ++generation};
        const auto reserved = table.reserve(chunk, purpose, "walk");
        ASSERT_EQ(reserved.has_value(), naive.make_room());
        if (!reserved) break;
        Naive::Entry& taken = naive.frames[reserved->frame.frame];
        ASSERT_EQ(taken.state, FrameState::kFree);
        taken = {purpose, taken.use + 1, chunk, 1, now, {}};
        ASSERT_EQ(reserved->frame.use, taken.use);
        holds.push_back({reserved->frame, reserved->pin});
        refs.push_back(reserved->frame);
        break;
      }
      case 1: {
        if (entry != nullptr && entry->state > FrameState::kFillingFromSlot) break;
        ASSERT_EQ(table.filled(ref), entry != nullptr);
        if (entry == nullptr) break;
        entry->state = entry->state == FrameState::kFillingFromSlot ? FrameState::kClean : FrameState::kDirty;
        entry->used_at = now;
        break;
      }
      case 2:
        if (entry != nullptr && entry->state != FrameState::kDirty) break;
        ASSERT_EQ(table.write_back_started(ref), entry != nullptr);
        if (entry != nullptr) entry->state = FrameState::kWritingBack;
        break;
      case 3:
        if (entry != nullptr && entry->state != FrameState::kWritingBack) break;
        ASSERT_EQ(table.written_back(ref), entry != nullptr);
        if (entry == nullptr) break;
        entry->state = FrameState::kClean;
        entry->used_at = now;
        break;
      case 4:
        if (entry == nullptr) break;
        holds.push_back({ref, table.pin(ref, "walk")});
        entry->pins += 1;
        break;
      case 5: {
        if (holds.empty()) break;
        const std::uint32_t which = below(holds.size());
        Naive::Entry& held = naive.frames[holds[which].frame.frame];
        table.unpin(holds[which].pin);
        if (--held.pins == 0 && held.state == FrameState::kRetired) held.state = FrameState::kFree;
        holds.erase(holds.begin() + which);
        break;
      }
      case 6:
        table.touch(ref);
        if (entry != nullptr && entry->state == FrameState::kClean) entry->used_at = now;
        break;
      case 7:
        table.drop(ref);
        naive.drop(entry);
        break;
      default:
        ASSERT_EQ(table.hashed(ref, now), entry != nullptr);
        if (entry != nullptr) entry->checksum = now;
    }
    for (std::uint32_t f = 0; f < naive.frames.size(); ++f) {
      const Naive::Entry& want = naive.frames[f];
      const FrameTable::Frame& got = table.frame({f, want.use});
      ASSERT_EQ(got.state, want.state) << "frame " << f;
      ASSERT_EQ(got.pins, want.pins);
      if (want.state != FrameState::kFree) {
        ASSERT_EQ(got.checksum, want.checksum);
      }
    }
    ASSERT_EQ(table.pins().size(), holds.size());
    for (std::uint32_t s = 0; s < 8; ++s) {
      const Naive::Entry* want = naive.of_slot(s);
      const bool is_there = want != nullptr && want->state == FrameState::kClean;
      if (want != nullptr) {
        ASSERT_EQ(table.find(want->chunk).has_value(), is_there);
        ASSERT_FALSE(table.find({s, want->chunk.generation + 1}));
      }
    }
  }
}

TEST(FrameTable, EqualsANaiveOneInAThousandWalks) {
  const ChecksThrow checks;
  for (std::uint32_t seed = 0; seed < 1000; ++seed) {
    ASSERT_NO_THROW(walk(seed)) << seed;
    if (::testing::Test::HasFatalFailure()) FAIL() << "seed " << seed;
  }
}

}  // namespace
}  // namespace kvferry::sim
