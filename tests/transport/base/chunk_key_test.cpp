#include "transport/base/chunk_key.h"

#include <gtest/gtest.h>

#include <vector>

namespace kvferry {
namespace {

const std::vector<std::int32_t> kTokens = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

TEST(ChunkKey, IsTheSameOnEveryNodeAndForEver) {
  // The expected keys must never change: with other keys, a node of a new release finds no chunk in the pools of older
  // releases.
  const ChunkKey root = root_key("model", "");
  EXPECT_EQ(root.hex(), "fa3077d279203fd9bb0dc74342f43379");
  EXPECT_EQ(chunk_key(root, kTokens).hex(), "cb052c1c9a950218eda6112a20a6ec39");
}

TEST(ChunkKey, DependsOnFingerprintParentExtrasTokensAndTheirOrder) {
  const ChunkKey root = root_key("model", "");
  const ChunkKey key = chunk_key(root, kTokens);
  EXPECT_NE(root_key("model2", ""), root);
  EXPECT_NE(root_key("model", "lora-a"), root);
  EXPECT_NE(root_key("mode", "l"), root);  // the key depends on the lengths of both texts
  EXPECT_NE(chunk_key(key, kTokens), key);
  EXPECT_NE(chunk_key(root, kTokens, "image-1"), key);
  std::vector<std::int32_t> swapped = kTokens;
  std::swap(swapped[0], swapped[1]);
  EXPECT_NE(chunk_key(root, swapped), key);
  EXPECT_NE(chunk_key(root, std::span(kTokens).first(15)), key);
}

TEST(ChunkKey, TailGroupIsSharedByTailsWithTheSameStart) {
  const ChunkKey root = root_key("model", "");
  std::vector<std::int32_t> longer = kTokens;
  longer.push_back(99);
  EXPECT_EQ(tail_group_key(root, kTokens), tail_group_key(root, longer));
  EXPECT_NE(tail_group_key(root, kTokens), chunk_key(root, kTokens));
}

}  // namespace
}  // namespace kvferry
