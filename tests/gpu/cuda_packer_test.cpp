// Compares the kernels on a GPU with the plain loop, bit by bit.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "kernels/cuda/cuda_device.h"
#include "tests/gpu/device_cache.h"
#include "tests/gpu/run_pass.h"
#include "tests/kernels/random_cache.h"
#include "tests/kernels/reference_packer.h"

namespace kvferry {
namespace {

class CudaPackerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << "needs a GPU: " << why;
  }
};

class CudaPackerRandom : public CudaPackerTest, public ::testing::WithParamInterface<std::uint32_t> {};

MemoryKind random_memory(Random& random) { return random.once_in(2) ? MemoryKind::kPinned : MemoryKind::kDevice; }

TEST_P(CudaPackerRandom, EqualsThePlainLoopBitByBit) {
  constexpr std::uint32_t kSeeds = 100;
  for (std::uint32_t seed = GetParam() * kSeeds; seed < (GetParam() + 1) * kSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const CacheShape shape = random.once_in(4) ? random_shape(random) : random_gpu_shape(random);
    const ChunkFormat gathered = random_format(random, shape, true);
    TestCache by_reference(shape);
    DeviceCache by_device(shape);
    const std::vector<std::byte> memory = random.bytes(by_reference.memory().size());
    by_reference.set_memory(memory);
    by_device.set_memory(memory);
    auto tables = random_tables(random, shape);
    for (std::vector<BlockId>& table : tables)
      for (BlockId& block : table) block = random.once_in(5) ? kNoBlock : block;
    const std::uint32_t tokens = shape.blocks * shape.block_tokens;
    const TokenRun runs[] = {random_run(random, tokens, tables), random_run(random, tokens, tables)};

    const auto packer = make_cuda_packer(0, by_device.layout(), gathered).value();
    const auto reference = make_reference_packer(by_reference.layout(), gathered).value();
    const std::uint64_t token_bytes = packer->chunk_bytes_per_token();
    const DeviceBytes chunks[] = {DeviceBytes(runs[0].num_tokens * token_bytes),
                                  DeviceBytes(runs[1].num_tokens * token_bytes)};
    std::vector<PackerJob> jobs;
    for (int i = 0; i < 2; ++i)
      jobs.push_back({runs[i], chunks[i].data(), chunks[i].size(), runs[i].num_tokens, 0, random_memory(random)});
    const auto checksums = run_pass(packer->gather(jobs, nullptr, true), shape.layers, random.number(1, 3));
    ASSERT_TRUE(checksums) << checksums.error().what;
    for (int i = 0; i < 2; ++i) {
      std::vector<std::byte> expected(chunks[i].size());
      ASSERT_EQ((*checksums)[i], *reference->gather(runs[i], expected));
      ASSERT_EQ(chunks[i].get(), expected);
    }
    ASSERT_EQ(by_device.memory(), memory);

    const ChunkFormat scattered = random_format(random, shape, false);
    const auto to_device = make_cuda_packer(0, by_device.layout(), scattered).value();
    const auto to_reference = make_reference_packer(by_reference.layout(), scattered).value();
    const std::uint32_t skip_tokens = random.once_in(2) ? 0 : random.number(1, 9);
    const std::uint32_t chunk_tokens = skip_tokens + runs[0].num_tokens + (skip_tokens == 0 ? 0 : random.number(0, 9));
    const std::vector<std::byte> received = random.bytes(chunk_tokens * to_device->chunk_bytes_per_token());
    const DeviceBytes chunk(received);
    const std::vector<PackerJob> job = {
        {runs[0], chunk.data(), chunk.size(), chunk_tokens, skip_tokens, random_memory(random)}};
    const auto read = run_pass(to_device->scatter(job, nullptr, true), shape.layers, random.once_in(2) ? 99 : 1);
    ASSERT_TRUE(read) << read.error().what;
    ASSERT_EQ((*read)[0], chunk_checksum(received));
    ASSERT_TRUE(to_reference->scatter(received, chunk_tokens, skip_tokens, runs[0]));
    ASSERT_EQ(by_device.memory(), by_reference.memory());
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaPackerRandom, ::testing::Range(0u, 6u));

/// Gathers `num_jobs` runs of `tokens` tokens each and compares the chunks and their checksums with the plain loop's.
/// The packer is told that half of the chunks are in host memory.
void gather_and_compare(const CacheShape& shape, std::uint32_t num_jobs, std::uint32_t tokens) {
  Random random(num_jobs);
  TestCache by_reference(shape);
  DeviceCache by_device(shape);
  const std::vector<std::byte> memory = random.bytes(by_reference.memory().size());
  by_reference.set_memory(memory);
  by_device.set_memory(memory);
  const auto tables = random_tables(random, shape);
  const auto packer = make_cuda_packer(0, by_device.layout()).value();
  const auto reference = make_reference_packer(by_reference.layout()).value();
  const std::uint64_t chunk_bytes = tokens * packer->chunk_bytes_per_token();
  const DeviceBytes chunks(num_jobs * chunk_bytes);
  std::vector<PackerJob> jobs;
  for (std::uint32_t i = 0; i < num_jobs; ++i) {
    const std::uint32_t first = random.number(0, shape.blocks * shape.block_tokens - tokens);
    jobs.push_back({TokenRun{first, tokens, tables}, chunks.data() + i * chunk_bytes, chunk_bytes, tokens, 0,
                    i < num_jobs / 2 ? MemoryKind::kDevice : MemoryKind::kPinned});
  }
  const auto checksums = run_pass(packer->gather(jobs, nullptr, true), shape.layers, shape.layers);
  ASSERT_TRUE(checksums) << checksums.error().what;
  const std::vector<std::byte> gathered = chunks.get();
  for (std::uint32_t i = 0; i < num_jobs; ++i) {
    std::vector<std::byte> expected(chunk_bytes);
    ASSERT_EQ((*checksums)[i], *reference->gather(jobs[i].run, expected)) << "job " << i;
    ASSERT_TRUE(std::equal(expected.begin(), expected.end(), gathered.begin() + i * chunk_bytes)) << "job " << i;
  }
}

CacheShape shape_of_40_blocks(std::uint32_t layers, std::uint32_t head_dim) {
  CacheShape shape;
  shape.layers = layers;
  shape.blocks = 40;
  shape.block_tokens = 16;
  shape.head_dim = head_dim;
  shape.element_bytes = 2;
  return shape;
}

TEST_F(CudaPackerTest, DividesJobsThatDoNotFitIntoTheParametersOfALaunch) {
  gather_and_compare(shape_of_40_blocks(2, 16), 500, 64);
}

TEST_F(CudaPackerTest, CopiesChunksWithFewerThreadsThanTheyHaveSegments) {
  gather_and_compare(shape_of_40_blocks(8, 64), 4, 512);
}

TEST_F(CudaPackerTest, ReadsTablesThatDoNotFitIntoTheParametersOfALaunch) {
  CacheShape shape;
  shape.layers = 1;
  shape.heads = 1;
  shape.blocks = 3000;
  shape.block_tokens = 1;
  shape.head_dim = 16;
  shape.element_bytes = 2;
  gather_and_compare(shape, 3, 2500);
}

TEST_F(CudaPackerTest, RefusesWhatTheHostPackerRefuses) {
  const DeviceCache cache(CacheShape{});
  const auto packer = make_cuda_packer(0, cache.layout()).value();
  const std::vector<std::vector<BlockId>> tables = {{0, 4}};
  const DeviceBytes chunk(1 << 16);
  const std::vector<PackerJob> jobs = {{TokenRun{0, 8, tables}, chunk.data(), chunk.size(), 8, 0}};
  const auto pass = packer->gather(jobs, nullptr, true);
  ASSERT_FALSE(pass);
  EXPECT_EQ(pass.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(pass.error().what.find("block id 4"), std::string::npos) << pass.error().what;
}

TEST(CudaPacker, SaysWhyThereIsNoGpu) {
  const std::string why = why_no_gpu();
  if (why.empty()) GTEST_SKIP() << "there is one";
  const TestCache cache(CacheShape{});
  const auto packer = make_cuda_packer(0, cache.layout());
  ASSERT_FALSE(packer);
  EXPECT_EQ(packer.error().code, ErrorCode::kUnavailable);
  EXPECT_NE(packer.error().what.find(why), std::string::npos) << packer.error().what;
}

}  // namespace
}  // namespace kvferry
