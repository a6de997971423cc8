// Compares the packer of layers of unlike shapes with the plain loop, bit by bit, on a GPU.
#include "kernels/joined_packer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>

#include "kernels/cuda/cuda_device.h"
#include "tests/gpu/device_cache.h"
#include "tests/gpu/run_pass.h"
#include "tests/kernels/random_cache.h"
#include "tests/kernels/reference_packer.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;

/// Caches of unlike shapes, each in a KV group of its own, in GPU memory and for the plain loop. All have tokens for
/// the same runs.
struct UnlikeCaches {
  explicit UnlikeCaches(Random& random, bool is_for_gpus) : num_tokens(random.number(1, 40)) {
    const std::uint32_t num_layouts = random.number(1, 4);
    for (std::uint32_t i = 0; i < num_layouts; ++i) {
      CacheShape shape = is_for_gpus ? random_gpu_shape(random) : random_shape(random);
      shape.groups = 1;
      shape.blocks = (num_tokens + shape.block_tokens - 1) / shape.block_tokens + random.number(0, 2);
      const TestCache& plain = by_reference.emplace_back(shape);
      DeviceCache& cache = by_device.emplace_back(shape);
      const std::vector<std::byte> memory = random.bytes(plain.memory().size());
      by_reference.back().set_memory(memory);
      cache.set_memory(memory);
      formats.push_back(random_format(random, shape, true));
      tables.push_back(random_tables(random, shape).at(0));
      for (BlockId& block : tables.back()) block = random.once_in(8) ? kNoBlock : block;
      plain_layouts.push_back(plain.layout());
      layouts.push_back(cache.layout());
      for (KvLayout* layout : {&plain_layouts.back(), &layouts.back()})
        for (LayerLayout& layer : layout->layers) layer.group = i;
    }
  }
  /// Returns what the plain loop gathers: the bytes of each layout, one after the other.
  std::vector<std::byte> gathered(const TokenRun& run) const {
    std::vector<std::byte> chunk;
    for (std::size_t i = 0; i < layouts.size(); ++i) {
      const auto packer = make_reference_packer(plain_layouts[i], formats[i]).value();
      std::vector<std::byte> part(run.num_tokens * packer->chunk_bytes_per_token());
      EXPECT_TRUE(packer->gather(run, part));
      chunk.insert(chunk.end(), part.begin(), part.end());
    }
    return chunk;
  }
  void scatter(std::span<const std::byte> chunk, std::uint32_t chunk_tokens, std::uint32_t skip, const TokenRun& run) {
    for (std::size_t i = 0; i < layouts.size(); ++i) {
      const auto packer = make_reference_packer(plain_layouts[i], formats[i]).value();
      const std::uint64_t bytes = chunk_tokens * packer->chunk_bytes_per_token();
      EXPECT_TRUE(packer->scatter(chunk.first(bytes), chunk_tokens, skip, run));
      chunk = chunk.subspan(bytes);
    }
  }

  std::uint32_t num_tokens;
  std::deque<TestCache> by_reference;
  std::deque<DeviceCache> by_device;
  std::vector<KvLayout> plain_layouts, layouts;
  std::vector<ChunkFormat> formats;
  std::vector<std::vector<BlockId>> tables;
};

class JoinedPackerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << "needs a GPU: " << why;
    gpu_ = open_gpu(0).value();
  }
  Gpu gpu_;
};

TEST_F(JoinedPackerTest, EqualsThePlainLoopBitByBit) {
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    UnlikeCaches caches(random, random.once_in(2));
    const auto packer = make_joined_packer(gpu_, caches.layouts, caches.formats).value();
    const std::uint64_t token_bytes = packer->chunk_bytes_per_token();
    const TokenRun runs[] = {random_run(random, caches.num_tokens, caches.tables),
                             random_run(random, caches.num_tokens, caches.tables)};
    const MemoryKind kinds[] = {MemoryKind::kDevice, MemoryKind::kPinned};
    const DeviceBytes chunks[] = {DeviceBytes(runs[0].num_tokens * token_bytes),
                                  DeviceBytes(runs[1].num_tokens * token_bytes)};
    std::vector<PackerJob> jobs;
    for (int i = 0; i < 2; ++i)
      jobs.push_back({runs[i], chunks[i].data(), chunks[i].size(), runs[i].num_tokens, 0, kinds[random.number(0, 1)]});
    const auto sums = run_pass(packer->gather(jobs, nullptr, true), packer->num_layers(), random.number(1, 5));
    ASSERT_TRUE(sums) << sums.error().what;
    ASSERT_EQ(sums->size(), 2u);
    for (int i = 0; i < 2; ++i) {
      const std::vector<std::byte> expected = caches.gathered(runs[i]);
      ASSERT_EQ(chunks[i].get(), expected);
      ASSERT_EQ((*sums)[i], chunk_checksum(expected));
    }

    const std::uint32_t skip_tokens = random.once_in(2) ? 0 : random.number(1, 9);
    const std::uint32_t chunk_tokens = skip_tokens + runs[0].num_tokens + (skip_tokens == 0 ? 0 : random.number(0, 9));
    const std::vector<std::byte> received = random.bytes(chunk_tokens * token_bytes);
    const DeviceBytes chunk(received);
    const PackerJob job{runs[0], chunk.data(), chunk.size(), chunk_tokens, skip_tokens, kinds[random.number(0, 1)]};
    const bool wants_checksums = random.once_in(2);
    const auto read = run_pass(packer->scatter({&job, 1}, nullptr, wants_checksums), packer->num_layers(),
                               random.once_in(2) ? 99 : 1);
    ASSERT_TRUE(read) << read.error().what;
    ASSERT_EQ(read->size(), wants_checksums ? 1u : 0u);
    if (wants_checksums) {
      ASSERT_EQ((*read)[0], chunk_checksum(received));
    }
    caches.scatter(received, chunk_tokens, skip_tokens, runs[0]);
    for (std::size_t i = 0; i < caches.layouts.size(); ++i)
      ASSERT_EQ(caches.by_device[i].memory(), caches.by_reference[i].memory()) << "layout " << i;
  }
}

TEST_F(JoinedPackerTest, RefusesWhatDoesNotFitItsLayouts) {
  const DeviceCache small(CacheShape{}), large(CacheShape{.block_tokens = 8});
  std::vector<KvLayout> layouts = {small.layout(), large.layout()};
  for (LayerLayout& layer : layouts[1].layers) layer.group = 1;
  EXPECT_EQ(make_joined_packer(gpu_, {}, {}).error().code, ErrorCode::kInvalidArgument);
  const std::vector<ChunkFormat> one_format(1);
  EXPECT_THAT(make_joined_packer(gpu_, layouts, one_format).error().what, HasSubstr("2 KV layouts and 1 formats"));
  const auto packer = make_joined_packer(gpu_, layouts, {}).value();
  ASSERT_EQ(packer->num_layers(), 4u);
  const DeviceBytes chunk(8 * packer->chunk_bytes_per_token());
  const auto refused = [&](const std::vector<std::vector<BlockId>>& tables, std::size_t bytes) {
    const PackerJob job{TokenRun{0, 8, tables}, chunk.data(), bytes, 8, 0};
    const auto pass = packer->gather({&job, 1}, nullptr, true);
    return pass ? std::string("not refused") : pass.error().what;
  };
  EXPECT_THAT(refused({{0, 1}, {2}}, chunk.size() - 1), HasSubstr("too small for 8 tokens"));
  EXPECT_THAT(refused({{0, 1}, {9}}, chunk.size()), HasSubstr("block id 9 at index 0 of KV group 1"));
  const std::vector<std::vector<BlockId>> tables = {{0, 1}, {2}};
  const PackerJob job{TokenRun{0, 8, tables}, chunk.data(), chunk.size(), 8, 0};
  const auto pass = packer->gather({&job, 1}, nullptr, true).value();
  EXPECT_THAT(pass->copy_layers(1, 2).error().what, HasSubstr("0 of 4 layers are copied"));
  EXPECT_TRUE(pass->copy_layers(0, 3));
  EXPECT_THAT(pass->copy_layers(3, 5).error().what, HasSubstr("3 of 4 layers are copied"));
  EXPECT_FALSE(pass->finish()) << "a layer is missing";
  EXPECT_TRUE(pass->copy_layers(3, 4));
  EXPECT_TRUE(pass->finish());
  EXPECT_TRUE(pass->wait());
}

}  // namespace
}  // namespace kvferry
