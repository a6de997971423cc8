#include "connector/core/token_chain.h"

#include <gtest/gtest.h>

#include <numeric>

#include "check_throws.h"

namespace kvferry::sim {
namespace {

class Chain : public ::testing::Test {
 protected:
  Chain() : tokens_(100) { std::iota(tokens_.begin(), tokens_.end(), 1); }
  TokenChain chain(std::size_t num_tokens, std::vector<TokenExtra> extras = {}) const {
    TokenChain made(root_key("model", ""), 32, std::move(extras));
    made.append(std::span(tokens_).first(num_tokens));
    return made;
  }
  ChecksThrow checks_;
  std::vector<std::int32_t> tokens_;
};

TEST_F(Chain, KeysDoNotDependOnHowTheTokensCame) {
  TokenChain whole = chain(100), pieces = chain(0);
  for (std::size_t i = 0; i < 100; ++i) {
    pieces.append(std::span(tokens_).subspan(i, 1));
    pieces.keys();
  }
  TokenChain taken = chain(0);
  taken.append(std::vector(tokens_.begin(), tokens_.begin() + 40));
  taken.append(std::vector(tokens_.begin() + 40, tokens_.end()));
  ASSERT_EQ(whole.num_full_chunks(), 3u);
  ASSERT_EQ(taken.num_full_chunks(), 3u);
  for (std::uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(whole.key(i), pieces.key(i));
    EXPECT_EQ(whole.key(i), taken.key(i));
  }
  EXPECT_EQ(whole.keys().size(), 3u);
  EXPECT_EQ(whole.key(0), chunk_key(root_key("model", ""), std::span(tokens_).first(32)));
  EXPECT_EQ(whole.key(1), chunk_key(whole.key(0), std::span(tokens_).subspan(32, 32)));
}

TEST_F(Chain, TruncatingDropsTheKeysOfWhatWasDropped) {
  TokenChain cut = chain(100);
  const ChunkKey first = cut.key(0), second = cut.key(1);
  cut.truncate(200);
  EXPECT_EQ(cut.size(), 100u);
  cut.truncate(63);
  EXPECT_EQ(cut.num_full_chunks(), 1u);
  const std::int32_t other = 999;
  cut.append(std::span(&other, 1));
  EXPECT_EQ(cut.key(0), first);
  EXPECT_NE(cut.key(1), second);
  cut.truncate(63);
  cut.append(std::span(tokens_).subspan(63, 1));
  EXPECT_EQ(cut.key(1), second);
}

TEST_F(Chain, ATailsKeyFollowsFromItsParentAndItsTokens) {
  TokenChain made = chain(100);
  EXPECT_EQ(made.tail_key(3, 4), chunk_key(made.key(2), std::span(tokens_).subspan(96, 4)));
  EXPECT_EQ(made.tail_key(0, 5), chunk_key(root_key("model", ""), std::span(tokens_).first(5)));
  EXPECT_NE(made.tail_key(1, 5), made.tail_key(1, 6));
  EXPECT_BREAKS(made.tail_key(3, 5), "no tail of 5 tokens");
  EXPECT_BREAKS(made.tail_key(1, 32), "no tail of 32 tokens");
  EXPECT_BREAKS(made.tail_key(1, 0), "no tail of 0 tokens");
  EXPECT_BREAKS(made.key(3), "chunk 3 does not exist");
}

TEST_F(Chain, AGroupNeedsSixteenTokensAndIsOneForAllTailsThatStartAlike) {
  EXPECT_FALSE(chain(32 + 15).tail_group(1));
  TokenChain shorter = chain(32 + 16), longer = chain(32 + 30);
  ASSERT_TRUE(shorter.tail_group(1));
  EXPECT_EQ(shorter.tail_group(1), longer.tail_group(1));
  EXPECT_NE(longer.tail_group(0), longer.tail_group(1));
  EXPECT_FALSE(longer.tail_group(2));
}

TEST_F(Chain, AnItemChangesTheKeysFromTheChunkThatItTouchesFirst) {
  TokenChain plain = chain(96), image = chain(96, {{40, 4, "cat"}}), other = chain(96, {{40, 4, "dog"}});
  EXPECT_EQ(plain.key(0), image.key(0));
  EXPECT_NE(plain.key(1), image.key(1));
  EXPECT_NE(image.key(1), other.key(1));
  EXPECT_NE(plain.key(2), image.key(2));  // the key of the parent chunk is a part of this key
  TokenChain moved = chain(96, {{41, 4, "cat"}});
  EXPECT_NE(image.key(1), moved.key(1));
}

TEST_F(Chain, AnItemAcrossAChunkBorderIsInBothChunks) {
  const auto second_chunk = [&](std::vector<TokenExtra> extras) {
    TokenChain made = chain(64, std::move(extras));
    return std::pair(made.key(0), made.key(1));
  };
  const auto across = second_chunk({{30, 4, "cat"}});
  const auto inside = second_chunk({{30, 2, "cat"}});
  EXPECT_EQ(across.first, inside.first);
  EXPECT_NE(across.second, inside.second);
}

}  // namespace
}  // namespace kvferry::sim
