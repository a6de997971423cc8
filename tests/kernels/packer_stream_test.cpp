// Compares the host packer with the plain loop in calls with more bytes than a core's cache holds. The packer uses
// streaming stores for them.
#include <gtest/gtest.h>

#include <array>

#include "kernels/chunk_shape.h"
#include "tests/kernels/random_cache.h"
#include "tests/kernels/reference_packer.h"

namespace kvferry {
namespace {

constexpr std::uint32_t kTokens = 256;

struct Streamed {
  const char* name;
  const char* order;
  std::uint32_t block_tokens = 16;
  bool converts = false;
  std::uint32_t chunk_heads = 0;  // number of heads in the chunk of a scatter; 0: the cache's 8 heads
  // Types of a cache and of its chunks, if it converts.
  ElementType cache_type = ElementType::kBf16, chunk_type = ElementType::kE4m3;
};

class PackerStream : public ::testing::TestWithParam<Streamed> {
 protected:
  /// Returns a shape with at least 4 MiB in a chunk.
  CacheShape shape() const {
    CacheShape made{.layers = GetParam().converts ? 8U : 4U, .blocks = 640 / GetParam().block_tokens, .heads = 8};
    made.block_tokens = GetParam().block_tokens;
    made.head_dim = 128;
    made.element_bytes = bytes_of(GetParam().cache_type);
    made.order = GetParam().order;
    made.key_transposed = made.order == kCpuAttention;
    return made;
  }
  ChunkFormat format(bool for_gather) const {
    ChunkFormat made;
    if (GetParam().converts) {
      made.cache_type = GetParam().cache_type;
      made.chunk_type = GetParam().chunk_type;
    }
    if (!for_gather && GetParam().chunk_heads > 0) made.heads = {GetParam().chunk_heads, 3, 0, 8};
    return made;
  }
};

TEST_P(PackerStream, EqualsThePlainLoopBitByBit) {
  Random random(11);
  TestCache streamed(shape()), plain(shape());
  const std::vector<std::byte> memory = random.bytes(plain.memory().size());
  streamed.set_memory(memory);
  plain.set_memory(memory);
  std::vector<std::vector<BlockId>> tables = random_tables(random, shape());
  tables[0][1] = kNoBlock;
  const auto packer = make_host_packer(streamed.layout(), format(true)).value();
  const auto reference = make_reference_packer(plain.layout(), format(true)).value();
  std::vector<std::byte> chunk(kTokens * packer->chunk_bytes_per_token()), expected(chunk.size());
  ASSERT_GE(chunk.size(), std::size_t{4} << 20);
  for (const std::uint32_t first : {0U, 128U, 5U}) {  // the last run does not begin at a block's first token
    const TokenRun run{first, kTokens, tables};
    EXPECT_EQ(packer->gather(run, chunk).value(), reference->gather(run, expected).value());
    ASSERT_EQ(chunk, expected) << "from token " << first;
    ChecksumStream whole;
    EXPECT_EQ(packer->gather_part(run, chunk, whole).value(), chunk_checksum(expected));
    EXPECT_EQ(whole.digest(), chunk_checksum(expected));
  }

  const auto unpacker = make_host_packer(streamed.layout(), format(false)).value();
  const auto plainly = make_reference_packer(plain.layout(), format(false)).value();
  const std::uint32_t chunk_tokens = kTokens + 20;
  const std::vector<std::byte> received = random.bytes(chunk_tokens * unpacker->chunk_bytes_per_token());
  for (const std::uint32_t first : {0U, 7U}) {
    const TokenRun run{first, kTokens, tables};
    ASSERT_TRUE(unpacker->scatter(received, chunk_tokens, 13, run));
    ASSERT_TRUE(plainly->scatter(received, chunk_tokens, 13, run));
    ASSERT_EQ(streamed.memory(), plain.memory()) << "from token " << first;
  }
}

TEST_P(PackerStream, ReturnsTheChecksumOfTheWholeChunk) {
  Random random(12);
  TestCache streamed(shape()), plain(shape());
  std::vector<std::vector<BlockId>> tables = random_tables(random, shape());
  tables[0][1] = kNoBlock;  // its tokens are hashed, although they are not copied
  const auto unpacker = make_host_packer(streamed.layout(), format(false)).value();
  const auto plainly = make_reference_packer(plain.layout(), format(false)).value();
  for (const auto& [chunk_tokens, skip_tokens, first] :
       {std::array{kTokens, 0U, 0U}, std::array{kTokens + 1, 0U, 0U}, std::array{kTokens + 20, 13U, 7U}}) {
    std::vector<std::byte> chunk = random.bytes(chunk_tokens * unpacker->chunk_bytes_per_token());
    const TokenRun run{first, kTokens, tables};
    ASSERT_TRUE(plainly->scatter(chunk, chunk_tokens, skip_tokens, run));
    EXPECT_EQ(unpacker->scatter_and_hash(chunk, chunk_tokens, skip_tokens, run).value(), chunk_checksum(chunk));
    ASSERT_EQ(streamed.memory(), plain.memory()) << chunk_tokens << " tokens";
    const std::uint64_t before = chunk_checksum(chunk);
    chunk[random.number(0, static_cast<std::uint32_t>(chunk.size() - 1))] ^= std::byte{1};
    EXPECT_NE(unpacker->scatter_and_hash(chunk, chunk_tokens, skip_tokens, run).value(), before);
    streamed.set_memory(plain.memory());
  }
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, PackerStream,
    ::testing::Values(
        Streamed{"nhd", kNhd}, Streamed{"hnd", kHnd}, Streamed{"hnd_of_more_heads", kHnd, 16, false, 12},
        Streamed{"nhd_interleaved", kNhdInterleaved}, Streamed{"hnd_interleaved", kHndInterleaved},
        Streamed{"block_outermost", kBlockOutermostHnd}, Streamed{"cpu_attention", kCpuAttention, 32},
        Streamed{"blocks_of_8", kHnd, 8}, Streamed{"hnd_to_fp8", kHnd, 32, true},
        Streamed{"nhd_to_fp8", kNhd, 32, true},
        Streamed{"hnd_fp8_to_bf16", kHnd, 16, true, 0, ElementType::kE4m3, ElementType::kBf16},
        Streamed{"cpu_attention_fp8_to_bf16", kCpuAttention, 32, true, 12, ElementType::kE5m2, ElementType::kBf16},
        Streamed{"nhd_fp16_to_bf16", kNhd, 16, true, 0, ElementType::kFp16, ElementType::kBf16},
        Streamed{"cpu_attention_bf16_to_fp32", kCpuAttention, 32, true, 0, ElementType::kBf16, ElementType::kFp32}),
    [](const auto& one) { return std::string(one.param.name); });

}  // namespace
}  // namespace kvferry
