// Tests everything that both packers refuse: the error names what was wrong, and nothing is copied.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/kernels/reference_packer.h"
#include "tests/kernels/test_cache.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;
using MakePacker = Result<std::unique_ptr<Packer>> (*)(KvLayout, ChunkFormat);

template <class T>
void expect_refused(const Result<T>& result, const std::string& reason) {
  ASSERT_FALSE(result) << "was accepted, though: " << reason;
  EXPECT_EQ(result.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(result.error().what, HasSubstr(reason));
}

class PackerErrors : public ::testing::TestWithParam<MakePacker> {
 protected:
  PackerErrors() : packer_(GetParam()(cache_.layout(), {}).value()) { cache_.set_memory(before_); }
  void expect_layout_refused(const std::function<void(KvLayout&)>& spoil, const std::string& reason) {
    KvLayout layout = cache_.layout();
    spoil(layout);
    expect_refused(GetParam()(layout, {}), reason);
  }
  /// Requests the same run in both directions, and checks that no byte was moved.
  void expect_run_refused(const TokenRun& run, const std::string& reason) {
    std::vector<std::byte> chunk(100 * packer_->layout().bytes_per_token(), std::byte{1});
    const std::vector<std::byte> chunk_before = chunk;
    expect_refused(packer_->gather(run, chunk), reason);
    EXPECT_EQ(chunk, chunk_before);
    expect_refused(packer_->scatter(chunk, 100, 0, run), reason);
    EXPECT_EQ(cache_.memory(), before_);
  }

  // The cache has two layers in two groups and blocks of 4 tokens. A token has 2 heads * 8 dims * 4 bytes * 2 planes *
  // 2 layers = 256 bytes.
  TestCache cache_{CacheShape{.groups = 2}};
  const std::vector<std::byte> before_ = std::vector<std::byte>(cache_.memory().size(), std::byte{7});
  const std::vector<std::vector<BlockId>> tables_ = {{0, 1, 2}, {3, 2, 1}};
  std::unique_ptr<Packer> packer_;
};

TEST_P(PackerErrors, ALayoutThatIsNotValidIsRefused) {
  expect_layout_refused([](KvLayout& l) { l.layers.clear(); }, "no layers");
  expect_layout_refused([](KvLayout& l) { l.block_tokens = 0; }, "block tokens 0");
  expect_layout_refused([](KvLayout& l) { l.planes = 3; }, "3 planes");
}

TEST_P(PackerErrors, ALayoutWhoseElementsShareBytesIsRefused) {
  expect_layout_refused([](KvLayout& l) { l.layers[1].key.token_stride_bytes = 0; },
                        "K of layer 'layers.1.attn': elements overlap, the token stride of 0 bytes must be at least 4 "
                        "(without its sign)");
  expect_layout_refused([](KvLayout& l) { l.layers[0].value.head_stride_bytes = 100; },
                        "V of layer 'layers.0.attn': elements overlap, the head stride of 100 bytes");
  expect_layout_refused([](KvLayout& l) { l.layers[0].value.dim_stride_bytes = -3; }, "the dim stride of -3 bytes");
}

TEST_P(PackerErrors, ALatentLayoutIsNotAskedForItsUnusedV) {
  KvLayout layout = cache_.layout();
  layout.planes = 1;
  layout.layers[0].value = {};
  layout.layers[1].value = {};
  EXPECT_TRUE(GetParam()(layout, {}));
}

TEST_P(PackerErrors, ALayoutThatLeavesTheAddressSpaceIsRefused) {
  const std::string reason = "bytes (block, head, token, dim) reach beyond the 63-bit address space";
  expect_layout_refused([](KvLayout& l) { l.layers[0].key.block_stride_bytes = INT64_MAX; }, reason);
  expect_layout_refused([](KvLayout& l) { l.layers[0].key.block_stride_bytes = INT64_MIN; }, reason);
  expect_layout_refused([](KvLayout& l) { l.layers[0].value.base = UINT64_MAX - 8; }, reason);
  expect_layout_refused(
      [](KvLayout& l) {
        l.layers[0].key.base = 64;
        l.layers[0].key.token_stride_bytes = -32;
      },
      reason);
}

TEST_P(PackerErrors, ALayoutWhoseTokenSizeOverflowsIsRefused) {
  expect_layout_refused(
      [](KvLayout& l) { l.num_kv_heads = l.head_dim = l.element_bytes = UINT32_MAX; },
      "bytes per token don't fit 64 bits: 4294967295 heads, head_dim 4294967295, element bytes 4294967295");
}

TEST_P(PackerErrors, AConversionBetweenOtherTypesIsRefused) {
  using enum ElementType;
  KvLayout fp8 = TestCache(CacheShape{.element_bytes = 1}).layout();
  expect_refused(GetParam()(fp8, {{}, kE4m3, kE5m2, {}}),
                 "cannot convert fp8 e4m3 in the cache to fp8 e5m2 in chunks; allowed: two of bf16, fp16, fp32 and "
                 "fp8, of which at most one is fp8");
  expect_refused(GetParam()(fp8, {{}, kBytes, kBf16, {}}), "cannot convert bytes in the cache to bf16 in chunks");
  expect_refused(GetParam()(cache_.layout(), {{}, kFp32, kBytes, {}}), "cannot convert fp32 in the cache to bytes");
  expect_refused(GetParam()(fp8, {{}, kE4m3, kBf16, {1, 1, 1, 1}}),
                 "scales are given for chunks of bf16; only chunks of fp8 have scales");
  expect_refused(GetParam()(fp8, {{}, kE4m3, kE4m3, {1, 1}}), "got 2 scales for 4 planes");
  expect_refused(GetParam()(cache_.layout(), {{}, kFp16, kBf16, {}}),
                 "the cache's elements have 4 bytes, but an element of type fp16 has 2");
}

TEST_P(PackerErrors, ABlockIdOutOfRangeIsRefused) {
  for (const BlockId bad : {4, -2, INT32_MAX, INT32_MIN}) {
    std::vector<std::vector<BlockId>> tables = tables_;
    tables[1][2] = bad;
    expect_run_refused({6, 5, tables},
                       "layer 'layers.1.attn': block id " + std::to_string(bad) +
                           " at index 2 of KV group 1 is out of range; [0, 4) and -1 (no block) are allowed");
  }
}

TEST_P(PackerErrors, ABlockIdOutsideTheRunIsNobodysBusiness) {
  const std::vector<std::vector<BlockId>> tables = {{-2, 1, 99}, {77, 2}};
  std::vector<std::byte> chunk(4 * 256);
  EXPECT_TRUE(packer_->gather({4, 4, tables}, chunk));
  EXPECT_TRUE(packer_->scatter(chunk, 4, 0, {4, 4, tables}));
}

TEST_P(PackerErrors, ABlockTableTooShortForTheTokensIsRefused) {
  const std::vector<std::vector<BlockId>> tables = {{0, 1, 2}, {3, 2}};
  expect_run_refused(
      {3, 6, tables},
      "layer 'layers.1.attn': tokens [3, 9) need a table of 3 blocks of 4 tokens, but the table of KV group 1 has 2");
  expect_run_refused({UINT32_MAX, 100, tables_},
                     "tokens [4294967295, 4294967395) need a table of 1073741849 blocks of 4 tokens, but the table of "
                     "KV group 0 has 3");
}

TEST_P(PackerErrors, AMissingGroupIsRefused) {
  const std::vector<std::vector<BlockId>> tables = {{0, 1, 2}};
  expect_run_refused(
      {0, 1, tables},
      "layer 'layers.1.attn' is in KV group 1 (counted from 0), but there are block tables of only 1 groups");
}

TEST_P(PackerErrors, AChunkBufferOneByteTooShortIsRefused) {
  std::vector<std::byte> chunk(5 * 256 - 1, std::byte{1});
  const std::string reason = "a chunk buffer of 1279 bytes is too small for 5 tokens of 256 bytes each";
  expect_refused(packer_->gather({0, 5, tables_}, chunk), reason);
  EXPECT_EQ(chunk, std::vector<std::byte>(chunk.size(), std::byte{1}));
  expect_refused(packer_->scatter(chunk, 5, 1, {0, 2, tables_}), reason);
  EXPECT_EQ(cache_.memory(), before_);
  expect_refused(packer_->scatter(chunk, UINT32_MAX, 0, {0, 2, tables_}), "4294967295 tokens of 256 bytes each");
}

TEST_P(PackerErrors, TokensThatTheChunkDoesNotHaveAreRefused) {
  const std::vector<std::byte> chunk(8 * 256);
  expect_refused(packer_->scatter(chunk, 8, 6, {0, 3, tables_}),
                 "3 tokens from token 6 on exceed the chunk's 8 tokens");
  expect_refused(packer_->scatter(chunk, 8, 9, {0, 0, tables_}), "0 tokens from token 9 on");
  expect_refused(packer_->scatter(chunk, 8, UINT32_MAX, {0, 2, tables_}), "2 tokens from token 4294967295 on");
  EXPECT_EQ(cache_.memory(), before_);
}

TEST_P(PackerErrors, ARunOfNoTokensCopiesNothingAndNeedsNoBlocks) {
  const Result<std::uint64_t> checksum = packer_->gather({9, 0, {}}, {});
  ASSERT_TRUE(checksum) << checksum.error().what;
  EXPECT_EQ(*checksum, chunk_checksum({}));
  EXPECT_TRUE(packer_->scatter({}, 0, 0, {9, 0, {}}));
  EXPECT_EQ(cache_.memory(), before_);
}

INSTANTIATE_TEST_SUITE_P(Both, PackerErrors, ::testing::Values(&make_reference_packer, &make_host_packer),
                         [](const auto& test) { return test.param == &make_host_packer ? "host" : "reference"; });

}  // namespace
}  // namespace kvferry
