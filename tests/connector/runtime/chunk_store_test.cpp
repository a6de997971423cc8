// Tests the promises of every chunk store.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/connector/runtime/test_store.h"
#include "transport/base/checksum.h"

namespace kvferry {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class Stores : public ::testing::TestWithParam<StoreModel> {
 protected:
  /// Writes new KV into these blocks, saves `tokens` of their tokens, and returns the checksum.
  std::uint64_t saved(ChunkRef chunk, const std::vector<BlockId>& blocks, std::uint32_t tokens) {
    for (const BlockId block : blocks) store_.engine.overwrite(block, ++seed_);
    store_.save({save_job("r", chunk, blocks, tokens)});
    const std::vector<SaveDone> done = store_.all_saved();
    EXPECT_EQ(done.size(), 1u);
    EXPECT_TRUE(!done.empty() && done[0].ok && done[0].chunk == chunk);
    return done.empty() ? 0 : done[0].checksum;
  }
  std::vector<std::byte> of(const std::vector<BlockId>& blocks, std::uint32_t tokens, std::uint32_t first = 0) {
    const std::vector<std::vector<BlockId>> table = {blocks};
    return store_.engine.expected({first, tokens, table});
  }
  /// Returns whether the first `tokens` tokens of the blocks are equal to those in `want`.
  bool holds(const std::vector<BlockId>& blocks, const std::vector<std::byte>& want, std::uint32_t tokens) {
    const std::vector<std::vector<BlockId>> table = {blocks};
    store_.engine.note_loaded(want, tokens, 0, {0, tokens, table});
    const std::uint64_t before = store_.engine.num_wrong();
    store_.engine.read({0, tokens, table});
    store_.run();
    return store_.engine.num_wrong() == before;
  }
  std::uint32_t seed_ = 0;
  TestStore store_{{.kind = GetParam().kind, .seed = 1, .has_unlike_layers = GetParam().has_unlike_layers}};
};

TEST_P(Stores, ASavedChunkIsInItsSlotWithItsChecksum) {
  const std::uint64_t sum = saved({2, 1}, {3, 7}, 8);
  const auto want = of({3, 7}, 8);
  const auto slot = store_.slot(2, want.size());
  EXPECT_TRUE(std::ranges::equal(slot, want));
  EXPECT_EQ(sum, chunk_checksum(want));
  EXPECT_THAT(store_.store->take_saved(), IsEmpty());
}

TEST_P(Stores, ATailIsPackedTight) {
  saved({0, 1}, {3, 7}, 5);
  const auto want = of({3, 7}, 5);
  EXPECT_TRUE(std::ranges::equal(store_.slot(0, want.size()), want));
}

TEST_P(Stores, WhatIsSavedCanBeLoadedElsewhere) {
  const auto sum = saved({2, 1}, {3, 7}, 8);
  const auto want = of({3, 7}, 8);
  const auto outcomes = store_.load({load_job("l", {2, 1}, sum, 8, {4, 5}, 8)});
  ASSERT_EQ(outcomes.size(), 1u);
  EXPECT_EQ(outcomes[0].tokens_loaded, 8u);
  EXPECT_THAT(outcomes[0].corrupt, IsEmpty());
  EXPECT_TRUE(holds({4, 5}, want, 8));
}

TEST_P(Stores, TwoJobsOfAStepMayLoadTheSameChunk) {
  const auto sum = saved({2, 1}, {3, 7}, 8);
  const auto want = of({3, 7}, 8);
  // Other chunks push this chunk out of the GPU's pool.
  for (std::uint32_t slot : {0u, 1u, 3u, 4u}) saved({slot, 1}, {8, 9}, 8);
  const auto outcomes =
      store_.load({load_job("a", {2, 1}, sum, 8, {4, 5}, 8), load_job("b", {2, 1}, sum, 8, {6, 10}, 8)});
  ASSERT_EQ(outcomes.size(), 2u);
  EXPECT_EQ(outcomes[0].tokens_loaded + outcomes[1].tokens_loaded, 16u);
  EXPECT_TRUE(holds({4, 5}, want, 8));
  EXPECT_TRUE(holds({6, 10}, want, 8));
}

TEST_P(Stores, ALoadMayLeaveOutTheStart) {
  const auto sum = saved({2, 1}, {3, 7}, 8);
  const auto want = of({3, 7}, 4, 4);
  EXPECT_EQ(store_.load({load_job("l", {2, 1}, sum, 8, {5}, 4, 4)})[0].tokens_loaded, 4u);
  EXPECT_TRUE(holds({5}, want, 4));
}

TEST_P(Stores, AChunkWithAnotherChecksumStopsItsJobAlone) {
  const auto one = saved({1, 1}, {3, 7}, 8);
  const auto two = saved({2, 1}, {3, 7}, 8);
  LoadJob job{"bad", 1, toy_tables({4, 5, 6, 8, 9, 10}), {}};
  job.items.push_back({{1, 1}, {one}, 8, 0, 0, 8});
  job.items.push_back({{2, 1}, {two + 1}, 8, 0, 8, 8});
  job.items.push_back({{1, 1}, {one}, 8, 0, 16, 8});
  const auto outcomes = store_.load({job, load_job("good", {1, 1}, one, 8, {0, 1}, 8)});
  EXPECT_EQ(outcomes[0].tokens_loaded, 8u);
  EXPECT_THAT(outcomes[0].corrupt, ElementsAre(ChunkRef{2, 1}));
  EXPECT_EQ(outcomes[1].tokens_loaded, 8u);
}

TEST_P(Stores, AChunkThatIsNotReadableIsCorrupt) {
  const auto sum = saved({1, 1}, {3, 7}, 8);
  store_.store->load(
      {load_job("l", {1, 1}, sum, 8, {4, 5}, 8)}, [](ChunkRef) { return false; }, store_.engine.stream());
  const auto outcomes = store_.all_loaded();
  EXPECT_EQ(outcomes[0].tokens_loaded, 0u);
  EXPECT_THAT(outcomes[0].corrupt, ElementsAre(ChunkRef{1, 1}));
  LoadJob without = load_job("l", {1, 1}, sum, 8, {4, 5}, 8);
  without.items[0].checksums.clear();
  EXPECT_THAT(store_.load({without})[0].corrupt, ElementsAre(ChunkRef{1, 1}));
}

TEST_P(Stores, ADamagedSlotIsNeverLoaded) {
  const auto sum = saved({5, 1}, {3, 7}, 8);
  for (std::uint32_t slot : {0u, 1u, 2u, 3u}) saved({slot, 1}, {8, 9}, 8);  // the GPU's pool has only these chunks
  store_.slot(5, 100)[99] ^= std::byte{1};
  const auto outcomes = store_.load({load_job("l", {5, 1}, sum, 8, {4, 5}, 8)});
  EXPECT_EQ(outcomes[0].tokens_loaded, 0u);
  EXPECT_THAT(outcomes[0].corrupt, ElementsAre(ChunkRef{5, 1}));
}

TEST_P(Stores, ABadBlockFailsItsOwnSaveAndLoadAlone) {
  store_.engine.overwrite(3, 1);
  store_.save({save_job("good", {0, 1}, {3}, 4), save_job("bad", {1, 1}, {99}, 4), save_job("good", {2, 1}, {3}, 4)});
  std::vector<SaveDone> done = store_.all_saved();
  ASSERT_EQ(done.size(), 3u);
  std::ranges::sort(done, {}, &SaveDone::chunk);
  EXPECT_TRUE(done[0].ok && !done[1].ok && done[2].ok);
  const auto outcomes = store_.load(
      {load_job("bad", {0, 1}, done[0].checksum, 4, {99}, 4), load_job("good", {2, 1}, done[2].checksum, 4, {5}, 4)});
  EXPECT_EQ(outcomes[0].tokens_loaded, 0u);
  EXPECT_THAT(outcomes[0].corrupt, IsEmpty());
  EXPECT_EQ(outcomes[1].tokens_loaded, 4u);
}

TEST_P(Stores, ASlotMayBeUsedAnew) {
  saved({2, 1}, {3, 7}, 8);
  const auto sum = saved({2, 2}, {3, 7}, 8);
  const auto want = of({3, 7}, 8);
  EXPECT_TRUE(std::ranges::equal(store_.slot(2, want.size()), want));
  EXPECT_EQ(store_.load({load_job("l", {2, 2}, sum, 8, {4, 5}, 8)})[0].tokens_loaded, 8u);
  EXPECT_TRUE(holds({4, 5}, want, 8));
}

TEST_P(Stores, WhatLandsIsInItsSlotAndCanBeLoaded) {
  saved({2, 1}, {3, 7}, 8);
  const auto want = of({3, 7}, 8);
  const ChunkRef chunks[] = {{0, 1}, {1, 1}};
  std::vector<ChunkStore::Landed> landed;
  for (const ChunkRef chunk : chunks) {
    const ChunkStore::Place place = store_.store->land(chunk, want.size()).value();
    std::memcpy(store_.book.base(place.region) + place.offset, want.data(), want.size());
    landed.push_back({chunk, chunk.slot == 0, chunk_checksum(want)});
  }
  store_.store->landed(landed);
  store_.run();
  auto told = store_.store->take_landed();
  std::erase_if(told, [](const ChunkStore::Landed& chunk) { return chunk.is_in_frame; });
  std::ranges::sort(told, {}, &ChunkStore::Landed::chunk);
  ASSERT_EQ(told.size(), 2u);
  EXPECT_TRUE(told[0].ok && !told[1].ok);
  EXPECT_TRUE(std::ranges::equal(store_.slot(0, want.size()), want));
  EXPECT_EQ(store_.load({load_job("l", {0, 1}, chunk_checksum(want), 8, {4, 5}, 8)})[0].tokens_loaded, 8u);
  EXPECT_TRUE(holds({4, 5}, want, 8));
  EXPECT_THAT(store_.store->take_landed(), IsEmpty());
}

TEST_P(Stores, WhatComesInPartsLandsInItsSlotWhateverLiesAbove) {
  saved({1, 1}, {3, 7}, 8);
  const auto want = of({3, 7}, 8);
  const ChunkStore::Place place = store_.store->land_in_slot({1, 2}, want.size()).value();
  ASSERT_EQ(store_.book.base(place.region) + place.offset, store_.slot(1, want.size()).data());
  std::memcpy(store_.book.base(place.region) + place.offset, want.data(), want.size());
  store_.store->landed(std::vector<ChunkStore::Landed>{{{1, 2}, true, chunk_checksum(want)}});
  // the chunk is already in its slot, so nothing has to be copied from the GPU
  EXPECT_THAT(store_.store->take_landed(), SizeIs(1));
  EXPECT_EQ(store_.load({load_job("l", {1, 2}, chunk_checksum(want), 8, {4, 5}, 8)})[0].tokens_loaded, 8u);
  EXPECT_TRUE(holds({4, 5}, want, 8));
}

std::vector<StoreModel> all_models() {
  std::vector<StoreModel> all;
  for (const StoreKind kind :
       {StoreKind::kHost, StoreKind::kGpuWithoutFrames, StoreKind::kGpu, StoreKind::kGpuWhereChunksLand})
    for (const bool has_unlike_layers : {false, true}) all.push_back({kind, has_unlike_layers});
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, Stores, ::testing::ValuesIn(all_models()),
                         [](const auto& model) { return store_model_name(model.param); });

}  // namespace
}  // namespace kvferry
