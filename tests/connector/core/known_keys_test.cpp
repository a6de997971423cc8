#include "connector/core/known_keys.h"

#include <gtest/gtest.h>

#include "core_bench.h"

namespace kvferry::sim {
namespace {

constexpr std::uint32_t kChunkTokens = 32;

class KnownKeysTest : public CoreBench {
 protected:
  KnownKeysTest() : CoreBench(sizes(kChunkTokens, 16, 64)) {}
  TokenChain chain(std::size_t num_tokens, const std::string& extras = "") const {
    TokenChain made(root_key("model", extras), kChunkTokens, {});
    made.append(std::span(tokens_).first(num_tokens));
    return made;
  }
  static EngineDigest digest(std::uint8_t number) {
    EngineDigest digest;
    digest.bytes.fill(number);
    return digest;
  }
  const std::vector<EngineDigest> digests_{digest(1), digest(2), digest(3)};
};

TEST_F(KnownKeysTest, KeysAreRecalledUpToTheFirstUnknownChunk) {
  KnownKeys known(100);
  TokenChain first = chain(100);
  first.key(1);  // the third chunk is not hashed
  known.remember(digests_, first, 0);

  TokenChain again = chain(100);
  known.recall(digests_, again);
  ASSERT_EQ(again.hashed_keys().size(), 2u);
  for (std::uint32_t i = 0; i < 3; ++i) EXPECT_EQ(again.key(i), chain(100).key(i));

  TokenChain other = chain(100);
  known.recall(std::vector{digest(1), digest(7), digest(3)}, other);
  EXPECT_EQ(other.hashed_keys().size(), 1u);
  TokenChain shorter = chain(40);
  known.recall(digests_, shorter);
  EXPECT_EQ(shorter.hashed_keys().size(), 1u);
}

TEST_F(KnownKeysTest, AnotherRootHasOtherKeys) {
  KnownKeys known(100);
  TokenChain plain = chain(100);
  plain.keys();
  known.remember(digests_, plain, 0);
  TokenChain salted = chain(100, "salt=a");
  known.recall(digests_, salted);
  EXPECT_TRUE(salted.hashed_keys().empty());
}

TEST_F(KnownKeysTest, OnlyTheLastUsedKeysAreKept) {
  KnownKeys known(3);
  TokenChain used = chain(100);
  used.keys();
  known.remember(digests_, used, 0);
  for (std::uint8_t number = 10; number < 40; number += 2) {
    known.remember(std::vector{digest(number), digest(number + 1)}, used, 0);
    TokenChain again = chain(32);
    known.recall(digests_, again);
    EXPECT_EQ(again.hashed_keys().size(), 1u) << "a key that is used all the time was dropped";
    EXPECT_LE(known.size(), 6u);
  }
  TokenChain again = chain(100);
  known.recall(digests_, again);
  EXPECT_EQ(again.hashed_keys().size(), 1u) << "the keys that were not used were kept";
}

TEST_F(KnownKeysTest, ADigestHasAtLeast128Bits) {
  EXPECT_EQ(engine_digest(std::string(32, '\x05')), digest(5));
  EXPECT_BREAKS(engine_digest("too short"), "a block hash of vLLM of 9 bytes is too short");
}

TEST_F(KnownKeysTest, ALookupWithDigestsFindsWhatALookupWithoutFinds) {
  cache(96);
  for (int turn = 0; turn < 3; ++turn) {
    const std::string id = "turn " + std::to_string(turn);
    NewRequest added = request(id, 100);
    added.digests = digests_;
    core_->add_request(added, now_);
    EXPECT_EQ(lookup(id).num_external, 96u);
    core_->finished(RequestId{id}, 0, {}, true, now_);
    build();
  }
  // A request with other tokens after the first chunk and the digests of a prefix of its own.
  std::vector<std::int32_t> tokens(tokens_.begin(), tokens_.begin() + 100);
  tokens[50] = 7;
  NewRequest other = request("other", 100);
  other.tokens = tokens;
  other.digests = {digest(1), digest(4), digest(5)};
  core_->add_request(other, now_);
  EXPECT_EQ(lookup("other").num_external, 32u);
}

}  // namespace
}  // namespace kvferry::sim
