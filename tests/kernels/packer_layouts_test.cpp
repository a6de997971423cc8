// Tests both packers with the layouts that vLLM's backends use, element by element.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "tests/kernels/reference_packer.h"
#include "tests/kernels/test_cache.h"

namespace kvferry {
namespace {

struct NamedLayout {
  std::string name;
  CacheShape shape;
};

using MakePacker = Result<std::unique_ptr<Packer>> (*)(KvLayout, ChunkFormat);

class PackerLayouts : public ::testing::TestWithParam<std::tuple<NamedLayout, MakePacker>> {};

// Returns a value that names the place of an element. Elements have 4 bytes, so that an element can hold this value.
std::uint32_t name_of_element(std::size_t layer, std::size_t head, std::size_t plane, std::size_t token,
                              std::size_t dim) {
  return static_cast<std::uint32_t>((((layer * 10 + head) * 10 + plane) * 1000 + token) * 1000 + dim);
}

void gathers_and_scatters(const NamedLayout& named, MakePacker make_packer,
                          const std::vector<std::vector<BlockId>>& tables) {
  const CacheShape& shape = named.shape;
  TestCache cache(shape);
  const std::unique_ptr<Packer> packer = make_packer(cache.layout(), {}).value();

  // the run has tokens of three blocks
  const std::uint32_t first_token = shape.block_tokens / 2, num_tokens = shape.block_tokens * 2;
  std::vector<std::byte> named_memory(cache.memory().size(), std::byte{0xee});
  std::vector<std::uint32_t> canonical;
  for (std::size_t layer = 0; layer < shape.layers; ++layer)
    for (std::size_t head = 0; head < shape.heads; ++head)
      for (std::size_t plane = 0; plane < shape.planes; ++plane)
        for (std::size_t token = first_token; token < first_token + num_tokens; ++token)
          for (std::size_t dim = 0; dim < shape.head_dim; ++dim) {
            const BlockId block = tables[layer % shape.groups][token / shape.block_tokens];
            canonical.push_back(block == kNoBlock ? 0 : name_of_element(layer, head, plane, token, dim));
            if (block == kNoBlock) continue;
            const std::size_t offset =
                cache.offset_of(layer, head, plane, static_cast<std::size_t>(block), token % shape.block_tokens, dim);
            std::memcpy(&named_memory.at(offset), &canonical.back(), 4);
          }

  cache.set_memory(named_memory);
  std::vector<std::uint32_t> chunk(canonical.size());
  const TokenRun run{first_token, num_tokens, tables};
  const Result<std::uint64_t> checksum = packer->gather(run, std::as_writable_bytes(std::span(chunk)));
  ASSERT_TRUE(checksum) << checksum.error().what;
  EXPECT_EQ(chunk, canonical);
  EXPECT_EQ(*checksum, chunk_checksum(std::as_bytes(std::span(canonical))));

  cache.set_memory(std::vector<std::byte>(named_memory.size(), std::byte{0xee}));
  const Result<void> scattered = packer->scatter(std::as_bytes(std::span(canonical)), num_tokens, 0, run);
  ASSERT_TRUE(scattered) << scattered.error().what;
  EXPECT_EQ(cache.memory(), named_memory);  // every other byte is still 0xee
}

TEST_P(PackerLayouts, GathersAndScattersInCanonicalOrder) {
  gathers_and_scatters(std::get<0>(GetParam()), std::get<1>(GetParam()), {{3, 0, 2}, {1, 3, 0}});
}

TEST_P(PackerLayouts, ABlockThatTheEngineGaveUpIsZerosInTheChunkAndIsNotWritten) {
  gathers_and_scatters(std::get<0>(GetParam()), std::get<1>(GetParam()), {{3, 0, kNoBlock}, {kNoBlock, kNoBlock, 0}});
}

CacheShape ordered(const char* order) { return {.groups = 2, .order = order}; }

const NamedLayout kLayouts[] = {
    {"Nhd", ordered(kNhd)},
    {"NhdPlanes", ordered(kNhdPlanes)},
    {"NhdInterleaved", ordered(kNhdInterleaved)},
    {"Hnd", ordered(kHnd)},
    {"HndInterleaved", ordered(kHndInterleaved)},
    {"BlockOutermostNhd", ordered(kBlockOutermostNhd)},
    {"BlockOutermostHnd", ordered(kBlockOutermostHnd)},
    {"CpuAttention", {.block_tokens = 32, .head_dim = 32, .order = kCpuAttention, .key_transposed = true}},
    {"CpuAttentionOddSizes", {.block_tokens = 6, .head_dim = 10, .order = kCpuAttention, .key_transposed = true}},
    {"MlaLatent", {.planes = 1, .heads = 1, .block_tokens = 16, .head_dim = 576, .order = kNhd}},
    {"MlaLatentPadded",
     {.planes = 1, .heads = 1, .head_dim = 576, .order = kNhd, .padding_bytes = {0, 64, 0, 16, 0, 0}}},
};

INSTANTIATE_TEST_SUITE_P(Vllm, PackerLayouts,
                         ::testing::Combine(::testing::ValuesIn(kLayouts),
                                            ::testing::Values(&make_reference_packer, &make_host_packer)),
                         [](const auto& test) {
                           const bool is_host = std::get<1>(test.param) == &make_host_packer;
                           return std::get<0>(test.param).name + (is_host ? "_host" : "_reference");
                         });

TEST(TestCacheLayout, CpuAttentionIsWhereItsKernelPutsIt) {
  // For fp32, bf16 and fp16, vLLM 0.32's cpu_attn_reshape_and_cache wrote the K element (head 1, dim 5) of token 37 to
  // element 6309 of a tensor [3 blocks, 2 heads, 32 tokens, 2 * 32], and the V element to element 7333.
  TestCache cache({.layers = 1,
                   .blocks = 3,
                   .block_tokens = 32,
                   .head_dim = 32,
                   .element_bytes = 2,
                   .order = kCpuAttention,
                   .key_transposed = true});
  EXPECT_EQ(cache.memory().size(), 3u * 2 * 32 * 2 * 32 * 2);
  EXPECT_EQ(cache.offset_of(0, 1, 0, 1, 5, 5) / 2, 6309u);
  EXPECT_EQ(cache.offset_of(0, 1, 1, 1, 5, 5) / 2, 7333u);
}

}  // namespace
}  // namespace kvferry
