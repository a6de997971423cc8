// Tests chunk stores whose layers have unlike shapes and block sizes.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "tests/connector/runtime/test_store.h"
#include "transport/base/checksum.h"

namespace kvferry {
namespace {

constexpr std::uint32_t kTokens = 12, kChunkTokens = 16;
const ChunkRef kChunk{1, 1};
const std::vector<std::vector<BlockId>> kTables = {{3, 1, 4}, {2, 5}};  // blocks of 4 tokens, and of 8 tokens

/// Two layers with two heads, in KV group 0, and a layer with one longer head, in group 1.
struct Caches {
  TestCache small{CacheShape{.blocks = 6}};
  TestCache large{CacheShape{.layers = 1, .blocks = 6, .heads = 1, .block_tokens = 8, .head_dim = 12}};

  std::vector<KvLayout> layouts() const {
    std::vector<KvLayout> found = {small.layout(), large.layout()};
    found[1].layers[0].group = 1;
    return found;
  }
  void fill(std::uint32_t seed) {
    std::mt19937 random(seed);
    for (TestCache* cache : {&small, &large}) {
      std::vector<std::byte> bytes(cache->memory().size());
      for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
      cache->set_memory(bytes);
    }
  }
};

class UnlikeLayouts : public ::testing::TestWithParam<StoreKind> {
 protected:
  UnlikeLayouts() : token_bytes_(bytes_per_token(caches_.layouts())), pool_(4 * kChunkTokens * token_bytes_) {
    caches_.fill(1);
    store_ = store_of(caches_, GetParam());
  }
  std::unique_ptr<ChunkStore> store_of(const Caches& caches, StoreKind kind) {
    ChunkStoreParts parts{caches.layouts(), 0, pool_, kChunkTokens * token_bytes_, {}};
    if (kind == StoreKind::kHost) return make_host_store(std::move(parts)).value();
    const std::uint64_t frames = kind == StoreKind::kGpuWithoutFrames ? 0 : 1 << 16;
    return make_gpu_store(std::move(parts), {make_sim_gpu(device_), frames, false, kSecond, clock_, book_}).value();
  }
  std::span<std::byte> chunk() { return std::span(pool_).subspan(kChunkTokens * token_bytes_, kTokens * token_bytes_); }
  SaveJob save_job() const { return {"a", kTables, {{kChunk, 0, kTokens, 0, 0}}}; }
  std::vector<SaveDone> saved(const std::vector<SaveJob>& jobs) {
    store_->save(jobs, nullptr);
    device_->run_all();
    return store_->take_saved();
  }
  LoadOutcome loaded(ChunkStore& store, const LoadJob& job) {
    store.load(
        {job}, [](ChunkRef) { return true; }, nullptr);
    device_->run_all();
    return store.take_loaded().at(0).outcome;
  }

  std::shared_ptr<SimDevice> device_ = std::make_shared<SimDevice>(1);
  ManualClock clock_;
  StillTransport book_;
  Caches caches_;
  std::uint64_t token_bytes_;
  std::vector<std::byte> pool_;
  std::unique_ptr<ChunkStore> store_;
};

TEST_P(UnlikeLayouts, AChunkHasTheBytesOfEachLayoutOneAfterTheOther) {
  const std::vector<SaveDone> done = saved({save_job()});
  ASSERT_EQ(done.size(), 1u);
  EXPECT_TRUE(done[0].ok);
  EXPECT_EQ(done[0].checksum, chunk_checksum(chunk()));
  std::uint64_t first = 0;
  for (const KvLayout& layout : caches_.layouts()) {
    std::vector<std::byte> expected(kTokens * layout.bytes_per_token());
    ASSERT_TRUE(make_host_packer(layout).value()->gather({0, kTokens, kTables}, expected));
    const auto part = chunk().subspan(first, expected.size());
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), part.begin()));
    first += expected.size();
  }
  EXPECT_EQ(first, chunk().size());
}

TEST_P(UnlikeLayouts, ALoadFillsTheBlocksOfEveryLayout) {
  const std::uint64_t checksum = saved({save_job()}).at(0).checksum;
  Caches other;
  other.fill(2);
  const auto into = store_of(other, GetParam());
  const std::vector<std::vector<BlockId>> tables = {{kNoBlock, 2, 5}, {1, 4}};
  EXPECT_EQ(loaded(*into, {"b", 1, tables, {{kChunk, {checksum}, kTokens, 4, 4, 8}}, true}).tokens_loaded, 8u);
  for (std::size_t i = 0; i < 2; ++i) {
    const KvLayout from = caches_.layouts()[i], to = other.layouts()[i];
    std::vector<std::byte> expected(8 * from.bytes_per_token()), found = expected;
    ASSERT_TRUE(make_host_packer(from).value()->gather({4, 8, kTables}, expected));
    ASSERT_TRUE(make_host_packer(to).value()->gather({4, 8, tables}, found));
    EXPECT_EQ(found, expected) << "layout " << i;
  }
}

TEST_P(UnlikeLayouts, AWrongBitInAnyLayoutIsFound) {
  const std::uint64_t checksum = saved({save_job()}).at(0).checksum;
  const LoadJob job{"b", 1, kTables, {{kChunk, {checksum}, kTokens, 0, 0, kTokens}}, true};
  const std::size_t small_bytes = kTokens * caches_.small.layout().bytes_per_token();
  for (const std::size_t place : {std::size_t{0}, small_bytes - 1, small_bytes, chunk().size() - 1}) {
    const auto into = store_of(caches_, GetParam());  // this store has the chunk in no frame
    chunk()[place] ^= std::byte{1};
    const LoadOutcome outcome = loaded(*into, job);
    EXPECT_EQ(outcome.tokens_loaded, 0u);
    EXPECT_EQ(outcome.corrupt, std::vector<ChunkRef>{kChunk}) << "byte " << place;
    chunk()[place] ^= std::byte{1};
    EXPECT_EQ(loaded(*into, job).tokens_loaded, kTokens);
  }
}

TEST_P(UnlikeLayouts, ABadBlockOfOneGroupFailsItsOwnSaveAndLoadAlone) {
  const std::vector<std::vector<BlockId>> bad_tables = {kTables[0], {2, 99}};
  std::vector<SaveDone> done = saved({{"bad", bad_tables, {{{0, 1}, 0, kTokens, 0, 0}}}, save_job()});
  ASSERT_EQ(done.size(), 2u);
  std::ranges::sort(done, {}, &SaveDone::chunk);
  EXPECT_FALSE(done[0].ok);
  EXPECT_TRUE(done[1].ok);
  const LoadItem item{kChunk, {done[1].checksum}, kTokens, 0, 0, kTokens};
  store_->load(
      {{"bad", 1, bad_tables, {item}, true}, {"good", 1, kTables, {item}, true}}, [](ChunkRef) { return true; },
      nullptr);
  device_->run_all();
  for (const ChunkStore::Loaded& load : store_->take_loaded())
    EXPECT_EQ(load.outcome.tokens_loaded, load.job.request_id == "good" ? kTokens : 0u);
}

INSTANTIATE_TEST_SUITE_P(All, UnlikeLayouts,
                         ::testing::Values(StoreKind::kHost, StoreKind::kGpuWithoutFrames, StoreKind::kGpu),
                         [](const auto& kind) {
                           return store_model_name({kind.param, false});
                         });

class UnlikeLayoutsOnTheHost : public UnlikeLayouts {};
INSTANTIATE_TEST_SUITE_P(Host, UnlikeLayoutsOnTheHost, ::testing::Values(StoreKind::kHost));

TEST_P(UnlikeLayoutsOnTheHost, LayersOfUnlikeSizeAreSavedOneByOneToTheSameBytes) {
  store_->save({save_job()}, nullptr);
  const std::uint64_t checksum = store_->take_saved().at(0).checksum;
  const std::vector<std::byte> at_once(chunk().begin(), chunk().end());
  std::fill(pool_.begin(), pool_.end(), std::byte{0});
  for (std::uint32_t layer = 0; layer < 3; ++layer)
    ASSERT_TRUE(store_->save_layer(save_job(), save_job().items[0], layer));
  store_->save({save_job()}, nullptr);
  EXPECT_EQ(store_->take_saved().at(0).checksum, checksum);
  EXPECT_TRUE(std::equal(at_once.begin(), at_once.end(), chunk().begin()));
}

}  // namespace
}  // namespace kvferry
