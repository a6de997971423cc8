// Compares the device code, which this processor runs lane by lane, with the plain loop and libxxhash, bit by bit.
#include <gtest/gtest.h>
#include <xxhash.h>

#include <random>

#include "tests/kernels/emulated_launch.h"
#include "tests/kernels/emulated_packer.h"
#include "tests/kernels/random_cache.h"
#include "tests/kernels/reference_packer.h"
#include "transport/base/checksum.h"

namespace kvferry {
namespace {

TEST(SegmentHash, IsXxh3) {
  Random random(1);
  const device::SegmentSecret secret = device::segment_secret();
  for (int round = 0; round < 200; ++round) {
    const std::vector<std::byte> bytes = random.bytes(kSegmentBytes);
    std::uint64_t hash = 0;
    emulate_hash(secret, bytes.data(), bytes.size(), &hash);
    ASSERT_EQ(hash, XXH3_64bits(bytes.data(), bytes.size()));
  }
}

class DeviceCode : public ::testing::TestWithParam<std::uint32_t> {};

TEST_P(DeviceCode, EqualsThePlainLoopBitByBit) {
  constexpr std::uint32_t kSeeds = 200;
  int num_vectorised = 0, num_converted = 0;
  for (std::uint32_t seed = GetParam() * kSeeds; seed < (GetParam() + 1) * kSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const CacheShape shape = random.once_in(4) ? random_shape(random) : random_gpu_shape(random);
    const ChunkFormat gather_format = random_format(random, shape, true);
    TestCache by_device(shape), by_reference(shape);
    const std::vector<std::byte> memory = random.bytes(by_device.memory().size());
    by_device.set_memory(memory);
    by_reference.set_memory(memory);
    auto tables = random_tables(random, shape);
    for (std::vector<BlockId>& table : tables)
      for (BlockId& block : table) block = random.once_in(5) ? kNoBlock : block;
    const TokenRun run = random_run(random, shape.blocks * shape.block_tokens, tables);

    const Result<EmulatedPacker> device = EmulatedPacker::make(by_device.layout(), gather_format, random.number(1, 3));
    ASSERT_TRUE(device) << device.error().what;
    const auto reference = make_reference_packer(by_reference.layout(), gather_format).value();
    num_vectorised += device->is_vectorised() ? 1 : 0;
    num_converted += gather_format.cache_type != gather_format.chunk_type ? 1 : 0;
    ASSERT_EQ(device->chunk_bytes_per_token(), reference->chunk_bytes_per_token());
    std::vector<std::byte> device_chunk(run.num_tokens * device->chunk_bytes_per_token(), std::byte{0xaa});
    std::vector<std::byte> reference_chunk = device_chunk;
    const Result<std::uint64_t> checksum = device->gather(run, device_chunk);
    ASSERT_TRUE(checksum) << checksum.error().what;
    ASSERT_EQ(*checksum, *reference->gather(run, reference_chunk));
    ASSERT_EQ(device_chunk, reference_chunk);
    ASSERT_EQ(by_device.memory(), memory);

    const ChunkFormat scatter_format = random_format(random, shape, false);
    const auto to_device = EmulatedPacker::make(by_device.layout(), scatter_format, random.number(1, 3)).value();
    const auto to_reference = make_reference_packer(by_reference.layout(), scatter_format).value();
    const std::uint32_t skip_tokens = random.number(0, 9);
    const std::uint32_t chunk_tokens = skip_tokens + run.num_tokens + random.number(0, 9);
    const std::vector<std::byte> received = random.bytes(chunk_tokens * to_device.chunk_bytes_per_token());
    ASSERT_TRUE(to_device.scatter(received, chunk_tokens, skip_tokens, run));
    ASSERT_TRUE(to_reference->scatter(received, chunk_tokens, skip_tokens, run));
    ASSERT_EQ(by_device.memory(), by_reference.memory());
  }
  EXPECT_GT(num_vectorised, static_cast<int>(kSeeds) / 3);
  EXPECT_GT(num_converted, 10);
}

INSTANTIATE_TEST_SUITE_P(Seeds, DeviceCode, ::testing::Range(0u, 8u));

}  // namespace
}  // namespace kvferry
