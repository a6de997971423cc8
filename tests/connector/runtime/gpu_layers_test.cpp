// Tests the GPU store's saves by groups of layers, and its checks of chunks that came layer by layer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/connector/runtime/test_store.h"
#include "transport/base/checksum.h"

namespace kvferry {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Lt;
using ::testing::SizeIs;

constexpr std::uint32_t kNumTokens = 4;

class SavesByLayers : public ::testing::TestWithParam<bool> {
 protected:
  SavesByLayers() {
    test_.engine.overwrite(3, 1);
    test_.run();
  }
  std::vector<SaveJob> jobs(std::uint64_t generation = 1) const {
    return {save_job("r", {0, generation}, {3}, kNumTokens)};
  }
  void save_layers(std::uint32_t end, std::uint64_t generation = 1) {
    test_.store->save_layers(jobs(generation), end, test_.engine.stream());
  }
  std::vector<std::byte> expected() const {
    const std::vector<std::vector<BlockId>> table = {{3}};
    return test_.engine.expected({0, kNumTokens, table});
  }
  /// Returns the bytes of the chunk's frame, which is pinned.
  std::span<std::byte> frame() {
    const std::vector<std::uint32_t> pinned =
        test_.store->pin_frames(7, std::vector<ChunkRef>{{0, 1}}, kSecond, {true});
    EXPECT_THAT(pinned, ElementsAre(Lt(3u)));
    const ChunkStore::Frames frames = test_.store->frames().value();
    return {test_.book.base(frames.region) + pinned.at(0) * frames.frame_bytes, expected().size()};
  }
  std::uint32_t num_layers() const { return GetParam() ? 4 : 2; }

  TestStore test_{{StoreKind::kGpuWhereChunksLand, 1, 6, 3, GetParam()}};
};

TEST_P(SavesByLayers, TellEachGroupWhenItIsInItsFrameAndTheChunkAsAnyOther) {
  for (std::uint32_t end = 1; end < num_layers(); ++end) {
    save_layers(end);
    EXPECT_TRUE(test_.store->is_saving_layers());
    EXPECT_THAT(test_.store->take_layers(), IsEmpty()) << "the GPU has not packed them";
    test_.run();
    const auto told = test_.store->take_layers();
    ASSERT_THAT(told, SizeIs(1));
    EXPECT_THAT(told[0].chunks, ElementsAre(ChunkRef{0, 1}));
    EXPECT_EQ(told[0].num_layers, end);
    EXPECT_FALSE(test_.store->is_saving_layers());
    const auto want = expected();
    EXPECT_TRUE(std::ranges::equal(frame().first(64), std::span(want).first(64)));
    EXPECT_FALSE(std::ranges::equal(frame(), want));
  }
  EXPECT_THAT(test_.store->take_saved(), IsEmpty());
  test_.save(jobs());
  const auto done = test_.all_saved();
  ASSERT_EQ(done.size(), 1u);
  EXPECT_TRUE(done[0].ok);
  EXPECT_EQ(done[0].checksum, chunk_checksum(expected()));
  EXPECT_TRUE(std::ranges::equal(frame(), expected()));
  EXPECT_TRUE(std::ranges::equal(test_.slot(0, expected().size()), expected()));
}

TEST_P(SavesByLayers, WaitForNothingAndAllocateNothing) {
  const std::uint64_t waits = test_.device->num_host_waits(), allocations = test_.device->num_allocations();
  save_layers(1);
  test_.save(jobs());
  test_.store->take_layers();
  test_.all_saved();
  EXPECT_EQ(test_.device->num_host_waits(), waits);
  EXPECT_EQ(test_.device->num_allocations(), allocations);
}

TEST_P(SavesByLayers, FailIfTheirStepEndsWithoutASave) {
  save_layers(1);
  test_.save(jobs(2));
  const auto done = test_.all_saved();
  ASSERT_EQ(done.size(), 2u) << "the GPU still writes the frame of the first one when the slot's next chunk comes";
  EXPECT_EQ(done[0].chunk, (ChunkRef{0, 1}));
  EXPECT_FALSE(done[0].ok);
  test_.all_saved();  // the event after the failed save is reached
  test_.save(jobs(3));
  for (const SaveDone& one : test_.all_saved()) EXPECT_TRUE(one.ok);
  EXPECT_EQ(test_.store->num_fenced(), 0u);
}

TEST_P(SavesByLayers, OfASlotThatIsInUseArePackedAtOnce) {
  test_.save(jobs());
  save_layers(1, 2);
  EXPECT_FALSE(test_.store->is_saving_layers());
  test_.save(jobs(2));
  const auto done = test_.all_saved();
  ASSERT_EQ(done.front().chunk, (ChunkRef{0, 2}));
  EXPECT_FALSE(done.front().ok) << "as ever";
}

TEST_P(SavesByLayers, AreWholeOrFailedWhateverTheGpuRefuses) {
  bool is_whole = false;
  for (int granted = 0; granted < 40; ++granted) {
    TestStore test{{StoreKind::kGpuWhereChunksLand, 1, 6, 3, GetParam()}};
    test.engine.overwrite(3, 1);
    test.run();
    test.device->refuse_after(granted, 1);
    for (std::uint32_t end = 1; end < num_layers(); ++end) test.store->save_layers(jobs(), end, test.engine.stream());
    test.save(jobs());
    is_whole = false;
    for (int i = 0; i < 3; ++i) {
      for (const SaveDone& one : test.all_saved()) {
        is_whole = one.ok && !one.is_in_frame;
        EXPECT_TRUE(!one.ok || one.checksum == chunk_checksum(expected())) << granted;
      }
      test.store->take_layers();
    }
    test.device->refuse_next(0);
    test.run();
    test.store->take_saved();
    test.store->take_layers();
    EXPECT_EQ(test.store->num_fenced(), 0u) << granted;
    const std::shared_ptr<SimDevice> device = test.device;
    test.store.reset();
    EXPECT_EQ(device->num_alive(), 1u) << granted << ": the engine's stream alone is left";
  }
  EXPECT_TRUE(is_whole) << "the last turn refuses nothing";
}

TEST_P(SavesByLayers, LandedChunksThatNobodyVerifiedAreCompared) {
  std::vector<std::byte> bytes(kNumTokens * test_.engine.chunk_bytes() / ToyEngine::kChunkTokens, std::byte{5});
  for (std::uint32_t slot = 1; slot < 3; ++slot) {
    const ChunkStore::Place place = test_.store->land({slot, 1}, bytes.size()).value();
    ASSERT_EQ(place.region, test_.store->frames()->region);
    std::ranges::copy(bytes, test_.book.base(place.region) + place.offset);
  }
  const std::uint64_t sum = chunk_checksum(bytes);
  test_.store->landed(std::vector<ChunkStore::Landed>{{{1, 1}, true, sum, false, false}});
  test_.store->landed(std::vector<ChunkStore::Landed>{{{2, 1}, true, sum + 1, false, false}});
  EXPECT_THAT(test_.store->take_landed(), IsEmpty()) << "the GPU has not hashed them";
  std::map<std::uint32_t, std::vector<bool>> told;
  for (int i = 0; i < 3; ++i) {
    test_.run();
    for (const ChunkStore::Landed& one : test_.store->take_landed()) told[one.chunk.slot].push_back(one.ok);
  }
  EXPECT_THAT(told[1], ElementsAre(true, true)) << "in its frame, then in its slot";
  EXPECT_THAT(told[2], ElementsAre(false));
  EXPECT_TRUE(std::ranges::equal(test_.slot(1, bytes.size()), bytes));
  EXPECT_EQ(test_.store->num_fenced(), 0u);
}

INSTANTIATE_TEST_SUITE_P(All, SavesByLayers, ::testing::Bool(),
                         [](const auto& made) { return std::string(made.param ? "UnlikeLayers" : "LikeLayers"); });

}  // namespace
}  // namespace kvferry
