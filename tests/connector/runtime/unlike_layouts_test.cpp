// Tests a chunk store in host memory whose layers have unlike shapes and block sizes.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "connector/runtime/store/chunk_store.h"
#include "tests/kernels/test_cache.h"
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

class UnlikeLayouts : public ::testing::Test {
 protected:
  UnlikeLayouts() : token_bytes_(bytes_per_token(caches_.layouts())), pool_(2 * kChunkTokens * token_bytes_) {
    caches_.fill(1);
    store_ = store_of(caches_);
  }
  std::unique_ptr<ChunkStore> store_of(const Caches& caches) {
    return make_host_store({caches.layouts(), 0, pool_, kChunkTokens * token_bytes_, {}}).value();
  }
  std::span<const std::byte> chunk() const {
    return std::span(pool_).subspan(kChunkTokens * token_bytes_, kTokens * token_bytes_);
  }
  SaveJob save_job() const { return {"a", kTables, {{kChunk, 0, kTokens, 0, 0}}}; }

  Caches caches_;
  std::uint64_t token_bytes_;
  std::vector<std::byte> pool_;
  std::unique_ptr<ChunkStore> store_;
};

TEST_F(UnlikeLayouts, AChunkHasTheBytesOfEachLayoutOneAfterTheOther) {
  store_->save({save_job()}, nullptr);
  const std::vector<SaveDone> saved = store_->take_saved();
  ASSERT_EQ(saved.size(), 1u);
  EXPECT_TRUE(saved[0].ok);
  EXPECT_EQ(saved[0].checksum, chunk_checksum(chunk()));
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

TEST_F(UnlikeLayouts, ALoadFillsTheBlocksOfEveryLayout) {
  store_->save({save_job()}, nullptr);
  const std::uint64_t checksum = store_->take_saved().at(0).checksum;
  Caches other;
  other.fill(2);
  const auto into = store_of(other);
  const std::vector<std::vector<BlockId>> tables = {{kNoBlock, 2, 5}, {1, 4}};
  into->load(
      {{"b", 1, tables, {{kChunk, {checksum}, kTokens, 4, 4, 8}}, true}}, [](ChunkRef) { return true; }, nullptr);
  EXPECT_EQ(into->take_loaded().at(0).outcome.tokens_loaded, 8u);
  for (std::size_t i = 0; i < 2; ++i) {
    const KvLayout from = caches_.layouts()[i], to = other.layouts()[i];
    std::vector<std::byte> expected(8 * from.bytes_per_token()), found = expected;
    ASSERT_TRUE(make_host_packer(from).value()->gather({4, 8, kTables}, expected));
    ASSERT_TRUE(make_host_packer(to).value()->gather({4, 8, tables}, found));
    EXPECT_EQ(found, expected) << "layout " << i;
  }
}

TEST_F(UnlikeLayouts, LayersOfUnlikeSizeAreSavedOneByOneToTheSameBytes) {
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
