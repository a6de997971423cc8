// Tests pulls from the GPU memory of one worker to that of another: two workers' stores and service threads, with the
// real transport on simulated GPUs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "connector/runtime/links/frame_leases.h"
#include "tests/connector/runtime/frame_side.h"

namespace kvferry {
namespace {

using ::testing::AnyOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class FramePulls : public ::testing::Test {
 protected:
  void start(SideOptions holder = {}, SideOptions reader = {}) {
    holder_.emplace(1, holder);
    reader_.emplace(2, reader);
    meet();
  }
  void meet() { reader_->meet(*holder_); }
  /// Saves `count` chunks at the holder, in slots 0 and up, and leases them.
  void save_and_lease(std::uint32_t count) {
    std::vector<ChunkRef> chunks;
    for (std::uint32_t i = 0; i < count; ++i) {
      bytes_.push_back(holder_->save({i, 1}, 100 + i));
      chunks.push_back({i, 1});
    }
    frames_ = holder_->lease(7, chunks);
  }
  /// Does the same, but before the chunks are in their slots.
  void save_and_lease_early(std::uint32_t count) {
    holder_->device->hold_copies_to_host(true);
    std::vector<ChunkRef> chunks;
    for (std::uint32_t i = 0; i < count; ++i) {
      bytes_.push_back(holder_->try_save({i, 1}, 100 + i, false).value());
      chunks.push_back({i, 1});
      ASSERT_TRUE(holder_->unsaved.contains({i, 1}));
    }
    frames_ = holder_->lease(7, chunks);
  }
  /// Makes the bytes of all of the holder's slots wrong, so that only frames have the chunks.
  void spoil_slots() { std::ranges::fill(holder_->pool.span(), std::byte{0x55}); }
  /// Pulls chunk i into slot `into + i` of the reader, and waits until all are in their slots. A chunk whose copy to
  /// the slot fails is not `ok`.
  PullOutcome pull(std::uint32_t into = 0) {
    PullOutcome done = pull_into_frames(into);
    for (std::uint32_t i = 0; i < done.in_frames.size(); ++i)
      if (done.in_frames[i]) done.ok[i] = reader_->wait_written({into + i, pulls_});
    return done;
  }
  PullOutcome pull_into_frames(std::uint32_t into = 0) {
    PullOrder order = reader_->order_from(*holder_, ++pulls_);
    for (std::uint32_t i = 0; i < bytes_.size(); ++i)
      order.items.push_back({{i, 1},
                             {into + i, pulls_},
                             kTokens,
                             {chunk_checksum(bytes_[i])},
                             {},
                             {frames_.at(i)},
                             holder_->unsaved.contains({i, 1})});
    return reader_->ask<PullOutcome>(order);
  }
  bool is_there(std::uint32_t chunk, std::uint32_t slot) {
    return std::ranges::equal(reader_->slot(slot), bytes_[chunk]);
  }

  std::optional<Side> holder_, reader_;
  std::vector<std::vector<std::byte>> bytes_;  // [chunk]
  std::vector<std::uint32_t> frames_;
  std::uint64_t pulls_ = 0;
};

TEST_F(FramePulls, GoFromFrameToFrameWithoutAnyHostSlot) {
  start();
  save_and_lease(3);
  EXPECT_THAT(frames_, Each(::testing::Lt(6u)));
  spoil_slots();
  const PullOutcome done = pull();
  EXPECT_THAT(done.ok, ElementsAre(true, true, true)) << done.what;
  EXPECT_EQ(done.num_in_frames, 3u);
  EXPECT_EQ(done.num_past_frames, 0u);
  EXPECT_THAT(done.path, AnyOf("gpu_ipc", "ucx/tcp")) << "the fastest when they were measured";
  EXPECT_EQ(done.host_why, "");
  for (std::uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(is_there(i, i)) << "what is pulled is readable for others too";
  // What was verified on its way is loaded from its frame, and not hashed again.
  std::ranges::fill(reader_->pool.span(), std::byte{0x66});
  const std::uint64_t before = num_passes_hashed();
  EXPECT_EQ(reader_->load({1, 1}, chunk_checksum(bytes_[1]), {5, 6}), kTokens);
  EXPECT_EQ(num_passes_hashed(), before);
  const std::vector<std::vector<BlockId>> blocks = {{5, 6}};
  reader_->engine.note_loaded(bytes_[1], kTokens, 0, {0, kTokens, blocks});
  reader_->engine.read({0, kTokens, blocks});
  EXPECT_TRUE(DeviceEvent::record(*reader_->device, reader_->engine.stream()).value().wait());
  EXPECT_EQ(reader_->engine.num_wrong(), 0u);
}

TEST_F(FramePulls, AreReportedAndLoadedBeforeTheyAreInTheirSlots) {
  start();
  save_and_lease(3);
  reader_->device->hold_copies_to_host(true);
  const PullOutcome done = pull_into_frames();
  EXPECT_THAT(done.ok, ElementsAre(true, true, true)) << done.what;
  EXPECT_THAT(done.in_frames, ElementsAre(true, true, true));
  for (std::uint32_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(reader_->core.loadable({i, 1}));
    EXPECT_FALSE(reader_->core.readable({i, 1})) << "not for other nodes yet";
    EXPECT_FALSE(reader_->core.locked([&](WorkerCore& core) { return core.writable({i, 2}); }));
  }
  EXPECT_THAT(reader_->lease(9, {{0, 1}, {0, 2}}), ElementsAre(::testing::Ne(kNoFrame), kNoFrame))
      << "a node may pull it from its frame";
  EXPECT_EQ(reader_->load({1, 1}, chunk_checksum(bytes_[1]), {5, 6}), kTokens);
  reader_->device->hold_copies_to_host(false);
  for (std::uint32_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(reader_->wait_written({i, 1}));
    EXPECT_TRUE(reader_->core.readable({i, 1}));
    EXPECT_TRUE(is_there(i, i));
  }
}

TEST_F(FramePulls, NeedNoSlotOfTheHolder) {
  start();
  save_and_lease_early(3);
  const PullOutcome done = pull();
  EXPECT_THAT(done.ok, ElementsAre(true, true, true)) << done.what;
  EXPECT_EQ(done.num_in_frames, 3u);
  for (std::uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(is_there(i, i));
  holder_->device->hold_copies_to_host(false);
  for (std::uint32_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(holder_->wait_saved({i, 1}));
    EXPECT_TRUE(std::ranges::equal(holder_->slot(i), bytes_[i]));
  }
}

TEST_F(FramePulls, NeverReadASlotThatIsNotWrittenYet) {
  start({}, {.num_frames = 1});
  save_and_lease_early(3);
  PullOutcome done = pull();
  EXPECT_EQ(std::ranges::count(done.ok, true), 1) << "there is one frame for three chunks";
  EXPECT_EQ(done.num_past_frames, 2u);
  EXPECT_THAT(done.what, HasSubstr("had in GPU memory only can't be pulled: no frame of GPU memory was free"));
  frames_[1] = 1000;  // lies outside of the holder's frames, so that the transfer can't be submitted
  reader_.emplace(3);
  meet();
  done = pull();
  EXPECT_THAT(done.ok, Each(false));
  EXPECT_EQ(done.num_in_frames, 0u);
  EXPECT_EQ(done.num_past_frames, 3u);
  done = pull();
  EXPECT_THAT(done.ok, Each(false)) << "the path is left alone for a while";
  reader_.emplace(4, SideOptions{.path = Path::kTcp});
  done = pull();
  EXPECT_THAT(done.ok, Each(false));
  EXPECT_THAT(done.what, HasSubstr("this node has no frames of GPU memory"));
  holder_->device->hold_copies_to_host(false);
  for (std::uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(holder_->wait_saved({i, 1}));
  EXPECT_THAT(pull().ok, Each(true)) << "all is in slots now";
}

TEST_F(FramePulls, OfALeaseSurviveThatTheHolderEvictsAndResets) {
  start();
  save_and_lease(3);
  for (std::uint32_t slot = 0; slot < kSlots; ++slot) holder_->save({slot, 2}, 200 + slot);
  EXPECT_THAT(pull().ok, ElementsAre(true, true, true));
  for (std::uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(is_there(i, i));
}

TEST_F(FramePulls, DropAndTellChunksWhoseFrameHasOtherBytesByNow) {
  start();
  save_and_lease(2);
  EXPECT_TRUE(holder_->link->send(seal(1, FrameUnpin{{7}})));
  holder_->lease(8, {});  // the worker has read the message before
  for (std::uint32_t slot = 2; slot < kSlots; ++slot) holder_->save({slot, 2}, 200 + slot);
  const PullOutcome done = pull();
  EXPECT_THAT(done.ok, ElementsAre(false, false));
  EXPECT_EQ(static_cast<ErrorCode>(done.code), ErrorCode::kCorrupt);
  EXPECT_EQ(reader_->core.readable({0, 1}), false);
  EXPECT_EQ(reader_->load({0, 1}, 1, {5, 6}), 0u);
}

TEST_F(FramePulls, OfALeaseWhoseTimeHasPassedHoldNoFrame) {
  start({.num_frames = 2});
  save_and_lease(1);
  EXPECT_THAT(holder_->lease(8, {{0, 1}}), ElementsAre(kNoFrame)) << "one frame is kept for others";
  EXPECT_THAT(holder_->lease(7, {{0, 1}}, 1), ElementsAre(frames_[0]));
  for (int i = 0; i < 1000 && holder_->lease(8, {{0, 1}}) == std::vector{kNoFrame}; ++i) ::poll(nullptr, 0, 5);
  EXPECT_THAT(holder_->lease(8, {{0, 1}}), ElementsAre(frames_[0]));
}

TEST_F(FramePulls, TakeFromSlotsWhatIsInNoFrame) {
  start({.num_frames = 2});
  save_and_lease(4);  // the first two are in slots alone by now, and one frame is pinned at most
  EXPECT_EQ(std::ranges::count(frames_, kNoFrame), 3);
  const PullOutcome done = pull();
  EXPECT_THAT(done.ok, ElementsAre(true, true, true, true)) << done.what;
  EXPECT_EQ(done.num_in_frames, 1u);
  EXPECT_EQ(done.num_past_frames, 0u);
  EXPECT_THAT(done.host_why, HasSubstr("the other node had the chunk in host memory"));
  for (std::uint32_t i = 0; i < 4; ++i) EXPECT_TRUE(is_there(i, i));
}

TEST_F(FramePulls, TakeFromSlotsWhatFindsNoFreeFrameHere) {
  start({}, {.num_frames = 1});
  save_and_lease(3);
  const PullOutcome done = pull();
  EXPECT_THAT(done.ok, ElementsAre(true, true, true)) << done.what;
  EXPECT_EQ(done.num_in_frames, 1u);
  EXPECT_EQ(done.num_past_frames, 2u);
  EXPECT_THAT(done.host_why, HasSubstr("no frame of GPU memory was free"));
}

TEST_F(FramePulls, SayThatNoFrameWasFreeThoughOtherChunksWereInNoFrameAnyway) {
  start({}, {.num_frames = 1});
  save_and_lease(3);
  frames_[2] = kNoFrame;
  const PullOutcome done = pull();
  EXPECT_THAT(done.ok, ElementsAre(true, true, true)) << done.what;
  EXPECT_EQ(done.num_past_frames, 1u);
  EXPECT_THAT(done.host_why, HasSubstr("no frame of GPU memory was free"));
}

TEST_F(FramePulls, GoFromSlotToSlotWhereOneNodeHasNoFrames) {
  start({.num_frames = 0});
  save_and_lease(2);
  EXPECT_THAT(frames_, ElementsAre(kNoFrame, kNoFrame));
  PullOutcome done = pull();
  EXPECT_THAT(done.ok, ElementsAre(true, true)) << done.what;
  EXPECT_EQ(done.num_in_frames, 0u);
  EXPECT_THAT(done.host_why, HasSubstr("the other node has no frames"));

  bytes_.clear();
  reader_.reset();
  holder_.reset();
  start({}, {.num_frames = 0});
  save_and_lease(2);
  done = pull();
  EXPECT_THAT(done.ok, ElementsAre(true, true)) << done.what;
  EXPECT_EQ(done.num_past_frames, 2u);
  EXPECT_THAT(done.host_why, HasSubstr("this node has no frames"));
}

TEST_F(FramePulls, GoFromSlotToSlotWhereNoPathReachesTheGpus) {
  start({}, {.path = Path::kTcp});
  EXPECT_FALSE(reader_->store->frames());
  save_and_lease(2);
  const PullOutcome done = pull();
  EXPECT_THAT(done.ok, ElementsAre(true, true)) << done.what;
  EXPECT_EQ(done.path, "tcp");
  EXPECT_EQ(done.num_in_frames, 0u);
}

TEST_F(FramePulls, GoFromSlotToSlotWhereThePathDidNotWorkWhenItWasMeasured) {
  holder_.emplace(1);
  reader_.emplace(2);
  reader_->device->refuse_next(1'000'000);
  meet();
  reader_->device->refuse_next(0);
  save_and_lease(2);
  const PullOutcome done = pull();
  EXPECT_THAT(done.ok, ElementsAre(true, true)) << done.what;
  EXPECT_EQ(done.num_past_frames, 2u);
  EXPECT_THAT(done.host_why, HasSubstr("no path to the peer's GPU memory works"));
  EXPECT_THAT(done.host_why, HasSubstr("the simulated GPU refuses"));
}

TEST_F(FramePulls, AreRightOrDroppedWhateverTheGpuRefuses) {
  holder_.emplace(1);
  save_and_lease(2);
  std::uint32_t in_frames = 0, in_slots = 0;
  // How often a thread polls the GPU during a pull depends on the host, so the last one is refused nothing.
  std::vector<int> calls(24);
  std::iota(calls.begin(), calls.end(), 0);
  calls.push_back(1'000'000'000);
  for (const int granted : calls) {
    reader_.emplace(100 + granted % 1000);
    meet();
    reader_->device->refuse_after(granted, 1);
    const PullOutcome done = pull();
    reader_->device->refuse_next(0);
    in_frames += done.num_in_frames;
    in_slots += done.num_past_frames;
    for (std::uint32_t i = 0; i < 2; ++i) {
      if (done.ok[i]) {
        EXPECT_TRUE(is_there(i, i)) << granted;
      }
    }
    EXPECT_TRUE(done.num_past_frames == 0 || done.ok == std::vector<bool>(2, true)) << "slots need no GPU " << granted;
  }
  EXPECT_GT(in_frames, 0u);
  EXPECT_GT(in_slots, 0u);
}

TEST_F(FramePulls, FallBackToSlotsWhenTheTransferFails) {
  start();
  save_and_lease(2);
  frames_[1] = 1000;  // lies outside of the holder's frames, so that the transfer can't be submitted
  const PullOutcome done = pull();
  EXPECT_THAT(done.ok, ElementsAre(true, true)) << done.what;
  EXPECT_EQ(done.num_in_frames, 0u);
  EXPECT_EQ(done.num_past_frames, 2u);
  EXPECT_NE(done.host_why, "");
  EXPECT_EQ(done.what, "") << "the request does not notice";
  for (std::uint32_t i = 0; i < 2; ++i) EXPECT_TRUE(is_there(i, i));
}

TEST_F(FramePulls, APushGetsASlotThoughFramesAreFree) {
  start();
  const std::vector<std::byte> bytes = holder_->save({0, 1}, 100);
  const auto granted = reader_->ask<GrantOutcome>(GrantOrder{5, {{0, {2, 1}, kTokens}}, 10 * kSecond});
  ASSERT_EQ(granted.grants.size(), 1u);
  ASSERT_NE(granted.grants[0], "");
  EXPECT_TRUE(holder_->link->send(seal(1, PushOrder{3, reader_->transport->address(), granted.grants})));
  const std::uint64_t checksum = chunk_checksum(bytes);
  EXPECT_TRUE(holder_->ask<PushOutcome>(PushStart{3, 0, {0, 1}, kTokens, {checksum}}).ok);
  const auto revoked = reader_->ask<Revoked>(Revocation{5, 0, {{0, {2, 1}, true, {checksum}}}});
  ASSERT_EQ(revoked.chunks.size(), 1u);
  EXPECT_TRUE(revoked.chunks[0].ok);
  EXPECT_TRUE(reader_->core.readable({2, 1}));
  EXPECT_TRUE(std::ranges::equal(reader_->slot(2), bytes));
}

TEST_F(FramePulls, APushOfWhatIsPulledEndsWhenTheChunkIsInItsFrameAndNotOnceMoreWhenItIsInItsSlot) {
  start();
  Pusher& pusher = holder_->loop->pusher();
  const SaveItem item{{0, 1}, 0, kTokens, 3, 0}, another{{1, 1}, 0, kTokens, 3, 1};
  pusher.reached_frame(item);
  const auto first = holder_->ask<PushOutcome>(PushOrder{3, {}, {}});  // nothing is granted
  EXPECT_FALSE(first.ok);
  EXPECT_EQ(first.index, 0u);
  pusher.reached_frame(another);
  EXPECT_EQ(holder_->next<PushOutcome>().index, 1u);
  PushDrop drop;
  drop.value = 3;
  holder_->send(drop);
  holder_->lease(8, {});  // the worker has read the message before
  for (const SaveItem& saved : {item, another}) pusher.saved(saved, true, 1);
  EXPECT_TRUE(holder_->lease(9, {}).empty()) << "this is the next answer";
}

/// Pulls of a chunk whose layers the holder packs meanwhile.
class GrowingPulls : public FramePulls {
 protected:
  GrowingPulls() { start({.has_unlike_layers = true}, {.has_unlike_layers = true}); }
  /// Lets the holder pack the first layer, and the reader begin the pull.
  void begin(std::int64_t timeout_ms = 10'000) {
    holder_->lease(6, {});  // a worker tells nothing before it has got an order
    holder_->begin_growth({0, 1}, 100, 3);
    const LayersSaved told = holder_->next_layers().value();
    EXPECT_EQ(told.push, 3u);
    EXPECT_THAT(told.indices, ElementsAre(0u));
    EXPECT_EQ(told.done, 1u);
    EXPECT_EQ(told.of, holder_->num_layers());
    const std::uint32_t frame = holder_->lease(7, {{0, 1}}, 60'000, true).at(0);
    EXPECT_NE(frame, kNoFrame);
    PullOrder order = reader_->order_from(*holder_, 1);
    order.timeout_ms = timeout_ms;
    order.items.push_back({{0, 1}, {0, 1}, kTokens, {}, {}, {frame}, true, true});
    reader_->send(order);
    tell(1);
  }
  void tell(std::uint32_t done) { reader_->send(PullProgress{1, {0}, done, holder_->num_layers(), false, {}}); }
  void settle(std::vector<std::uint64_t> checksums) {
    reader_->send(PullProgress{1, {0}, 0, 0, true, std::move(checksums)});
  }
  std::vector<std::byte> end_save() { return holder_->try_save({0, 1}, 100, false).value(); }
};

TEST_F(GrowingPulls, TakeEachLayerWhenItIsToldAndEndWithTheChecksumOfTheWholeChunk) {
  begin();
  holder_->grow({0, 1}, 3);
  EXPECT_EQ(holder_->next_layers().value().done, 3u);
  tell(3);
  ::poll(nullptr, 0, 50);
  EXPECT_FALSE(reader_->receive()) << "the chunk is not complete";
  const std::vector<std::byte> bytes = end_save();
  settle({chunk_checksum(bytes)});
  const auto done = reader_->next<PullOutcome>();
  EXPECT_THAT(done.ok, ElementsAre(true)) << done.what;
  EXPECT_THAT(done.in_frames, ElementsAre(true));
  EXPECT_EQ(done.num_in_frames, 1u);
  EXPECT_TRUE(reader_->core.loadable({0, 1}));
  EXPECT_TRUE(reader_->wait_written({0, 1}));
  EXPECT_TRUE(std::ranges::equal(reader_->slot(0), bytes));
  EXPECT_EQ(holder_->num_waits_in_steps, 0u);
}

TEST_F(GrowingPulls, DropAChunkWithAnotherChecksum) {
  begin();
  settle({chunk_checksum(end_save()) + 1});
  EXPECT_THAT(reader_->next<PullOutcome>().ok, ElementsAre(false));
  EXPECT_FALSE(reader_->core.loadable({0, 1}));
}

TEST_F(GrowingPulls, DropAChunkThatIsReadBeforeItIsThere) {
  begin();
  settle({chunk_checksum(reader_->engine.expected({0, kTokens, std::vector<std::vector<BlockId>>{{3, 4}}}))});
  EXPECT_THAT(reader_->next<PullOutcome>().ok, ElementsAre(false)) << "the other layers were not packed";
  end_save();
}

TEST_F(GrowingPulls, DropAChunkThatTheHolderCouldNotSave) {
  begin();
  settle({});
  EXPECT_THAT(reader_->next<PullOutcome>().ok, ElementsAre(false));
  end_save();
}

TEST_F(GrowingPulls, EndAtTheirDeadlineIfTheHolderIsGone) {
  begin(100);
  EXPECT_THAT(reader_->next<PullOutcome>().ok, ElementsAre(false));
  settle({1});  // comes too late
  EXPECT_EQ(reader_->core.locked([](const WorkerCore& core) { return core.num_pulls(); }), 0u);
  end_save();
}

TEST_F(GrowingPulls, IgnoreWhatFitsNoPull) {
  begin();
  reader_->send(PullProgress{1, {5}, 1, 4, false, {}});
  reader_->send(PullProgress{1, {0}, 1, 0, false, {}});
  reader_->send(PullProgress{1, {0}, 5, 4, false, {}});
  reader_->send(PullProgress{2, {0}, 1, 4, false, {}});
  const std::vector<std::byte> bytes = end_save();
  settle({chunk_checksum(bytes)});
  EXPECT_THAT(reader_->next<PullOutcome>().ok, ElementsAre(true));
  EXPECT_TRUE(reader_->wait_written({0, 1}));
}

TEST_F(GrowingPulls, AreRefusedWhereTheyHaveNoFrame) {
  PullOrder order = reader_->order_from(*holder_, 1);
  order.items.push_back({{0, 1}, {0, 1}, kTokens, {}, {}, {kNoFrame}, true, true});
  order.items.push_back({{1, 1}, {1, 1}, kTokens, {}, {}, {}, false, true});
  EXPECT_THAT(reader_->ask<PullOutcome>(order).ok, ElementsAre(false, false));
}

// ---- the scheduler node's part ----
class AnswersWithFrames : public ::testing::Test {
 protected:
  static LeaseAnswer answer(std::uint64_t lease) {
    LeaseAnswer made;
    made.reply = {lease, "", {{0, {4, 1}, 8, {1, 2}}, {1, {5, 1}, 8, {1, 2}}}};
    made.ranks = {{"a", "r", 64, {}, "f", 64}, {"b", "r", 64, {}, "f", 64}};
    return made;
  }
  FrameLeases leases_;
};

TEST_F(AnswersWithFrames, WaitForAllRanksAndTellEachRanksFrames) {
  const FramePinOrder order = leases_.begin({"x", 9}, answer(70), 0, 30 * kSecond, 100);
  EXPECT_EQ(order.lease, 70u);
  EXPECT_EQ(order.timeout_ms, 30'000);
  EXPECT_THAT(order.chunks, ElementsAre(ChunkRef{4, 1}, ChunkRef{5, 1}));
  leases_.take({70, 0, {3, kNoFrame}});
  leases_.take({70, 2, {3, 3}});  // there is no such rank
  leases_.take({70, 1, {3}});     // of another number of chunks
  leases_.take({71, 1, {3, 3}});  // of another lease
  EXPECT_TRUE(leases_.take_ready(99).empty());
  leases_.take({70, 1, {6, kNoFrame}});
  const auto ready = leases_.take_ready(99);
  ASSERT_EQ(ready.size(), 1u);
  EXPECT_EQ(ready[0].asker.id, 9u);
  EXPECT_THAT(ready[0].answer.reply.chunks[0].frames, ElementsAre(3u, 6u));
  EXPECT_THAT(ready[0].answer.reply.chunks[1].frames, ElementsAre());
  EXPECT_TRUE(leases_.end(70));
  EXPECT_FALSE(leases_.end(70));
}

TEST_F(AnswersWithFrames, LeaveOutWhatIsInNoSlotAndNotPinnedByEachRank) {
  LeaseAnswer made = answer(70);
  for (LeasedChunk& chunk : made.reply.chunks) chunk.lacks_slots = true;
  made.reply.chunks.push_back({2, {6, 1}, 8, {1, 2}});
  made.reply.chunks.push_back(made.reply.chunks[0]);
  leases_.begin({"x", 9}, made, 0, 30 * kSecond, 100);
  leases_.take({70, 0, {3, kNoFrame, kNoFrame, kNoFrame}});
  leases_.take({70, 1, {6, 7, 8, kNoFrame}});
  const auto ready = leases_.take_ready(99);
  ASSERT_EQ(ready.size(), 1u);
  const std::vector<LeasedChunk>& chunks = ready[0].answer.reply.chunks;
  ASSERT_EQ(chunks.size(), 2u);
  EXPECT_EQ(chunks[0].index, 0u);
  EXPECT_TRUE(chunks[0].lacks_slots);
  EXPECT_EQ(chunks[1].index, 2u) << "it is in slots";
}

TEST_F(AnswersWithFrames, DoNotWaitLongForARankThatIsLate) {
  leases_.begin({"x", 9}, answer(70), 0, 30 * kSecond, 100);
  leases_.take({70, 1, {6, 7}});
  const auto ready = leases_.take_ready(100);
  ASSERT_EQ(ready.size(), 1u);
  EXPECT_THAT(ready[0].answer.reply.chunks[0].frames, ElementsAre(kNoFrame, 6u));
  leases_.take({70, 0, {1, 2}});  // comes too late
  EXPECT_TRUE(leases_.take_ready(1000).empty());
  leases_.begin({"x", 10}, answer(71), 31 * kSecond, 30 * kSecond, 100);
  EXPECT_EQ(leases_.num_leases(), 1u) << "an expired lease is dropped";
}

}  // namespace
}  // namespace kvferry
