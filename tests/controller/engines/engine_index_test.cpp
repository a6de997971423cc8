#include "controller/engines/engine_index.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "tests/controller/engines/engine_test_kit.h"

namespace kvferry::controller {
namespace {

constexpr std::uint32_t kSize = 4;

/// Adds blocks of one holder to the index, as the decoder would.
void store(EngineIndex& index, HolderIndex holder, const std::vector<ShortKey>& hashes, std::optional<ShortKey> parent,
           const std::vector<std::uint32_t>& tokens, Tier tier = Tier::kGpu, std::optional<std::uint32_t> group = {},
           GroupKind kind = GroupKind::kUnknown) {
  BlocksStored blocks;
  blocks.hashes = hashes;
  blocks.parent = parent;
  blocks.tokens = tokens;
  blocks.block_size = kSize;
  blocks.tier = tier;
  blocks.group = group;
  blocks.kind = kind;
  index.stored(holder, blocks);
}
void remove(EngineIndex& index, HolderIndex holder, const std::vector<ShortKey>& hashes, Tier tier = Tier::kGpu,
            std::optional<std::uint32_t> group = {}) {
  index.removed(holder, {.hashes = hashes, .tier = tier, .group = group});
}
std::vector<std::uint32_t> tokens_of(std::uint32_t prompt, std::uint32_t from, std::uint32_t to) {
  std::vector<std::uint32_t> tokens;
  for (std::uint32_t i = from * kSize; i < to * kSize; ++i) tokens.push_back(prompt * 1000 + i);
  return tokens;
}
/// Returns the number of blocks that were found for each holder. Holders without blocks are left out.
std::map<HolderIndex, std::uint32_t> found(EngineIndex& index, const std::vector<std::uint32_t>& tokens) {
  std::vector<EngineMatch> matches;
  index.match_tokens(tokens, {}, matches);
  std::map<HolderIndex, std::uint32_t> all;
  for (const EngineMatch& match : matches) all[match.holder] = match.up_to_tier[kNumTiers - 1];
  return all;
}
using Found = std::map<HolderIndex, std::uint32_t>;

TEST(EngineIndex, EnginesOfUnlikeHashingAreFoundByTheSameTokens) {
  EngineIndex index({.block_size = kSize});
  const HolderIndex a = index.add_holder(""), b = index.add_holder("");
  store(index, a, {1, 2, 3}, {}, tokens_of(1, 0, 3));
  store(index, b, {71, 72}, {}, tokens_of(1, 0, 2));
  store(index, b, {73}, 72, tokens_of(1, 2, 3));
  EXPECT_EQ(found(index, tokens_of(1, 0, 5)), (Found{{a, 3}, {b, 3}}));
  std::vector<EngineMatch> matches;
  index.match_hashes(std::vector<ShortKey>{1, 2}, matches);
  EXPECT_EQ(matches.size(), 2U);
  remove(index, b, {72});
  EXPECT_EQ(found(index, tokens_of(1, 0, 3)), (Found{{a, 3}, {b, 1}}));
}

TEST(EngineIndex, OneHashThatMeansTwoThingsMeansEachToItsEngine) {
  EngineIndex index({.block_size = kSize});
  const HolderIndex a = index.add_holder(""), b = index.add_holder("");
  store(index, a, {1, 2}, {}, tokens_of(1, 0, 2));
  store(index, b, {1, 2}, {}, tokens_of(2, 0, 2));
  EXPECT_EQ(found(index, tokens_of(1, 0, 2)), (Found{{a, 2}}));
  EXPECT_EQ(found(index, tokens_of(2, 0, 2)), (Found{{b, 2}}));
  remove(index, b, {1});
  EXPECT_EQ(found(index, tokens_of(1, 0, 2)), (Found{{a, 2}}));
  EXPECT_EQ(found(index, tokens_of(2, 0, 2)), Found{});
  EXPECT_EQ(index.counters().hashes_ambiguous, 2U);
}

TEST(EngineIndex, BlocksOfACacheSaltAreFoundWithItAlone) {
  EngineIndex index({.block_size = kSize});
  const HolderIndex engine = index.add_holder("");
  const std::vector<ShortKey> hashes{1, 2};
  const std::vector<std::uint32_t> tokens = tokens_of(1, 0, 2);
  BlocksStored blocks;
  blocks.hashes = hashes;
  blocks.tokens = tokens;
  blocks.block_size = kSize;
  blocks.cache_salt = "s";
  index.stored(engine, blocks);
  EXPECT_EQ(found(index, tokens), Found{});
  std::vector<EngineMatch> matches;
  index.match_tokens(tokens, {"", {}, "s"}, matches);
  ASSERT_EQ(matches.size(), 1U);
  EXPECT_EQ(matches[0].up_to_tier[kNumTiers - 1], 2U);
}

TEST(EngineIndex, TiersAreToldApartAndTogether) {
  EngineIndex index({.block_size = kSize});
  const HolderIndex a = index.add_holder("");
  store(index, a, {1, 2}, {}, tokens_of(1, 0, 2));
  store(index, a, {2, 3}, 1, tokens_of(1, 1, 3), Tier::kHost);
  store(index, a, {4}, 3, tokens_of(1, 3, 4), Tier::kDisk);
  store(index, a, {5}, 4, tokens_of(1, 4, 5), Tier::kGpu);
  std::vector<EngineMatch> matches;
  index.match_tokens(tokens_of(1, 0, 6), {}, matches);
  ASSERT_EQ(matches.size(), 1U);
  EXPECT_EQ(std::vector<std::uint32_t>(matches[0].in_tier, matches[0].in_tier + 4),
            (std::vector<std::uint32_t>{2, 0, 0, 0}));
  EXPECT_EQ(std::vector<std::uint32_t>(matches[0].up_to_tier, matches[0].up_to_tier + 4),
            (std::vector<std::uint32_t>{2, 3, 5, 5}));
}

TEST(EngineIndex, OfSeveralGroupsTheFirstThatAttendsToAllSpeaks) {
  EngineIndex index({.block_size = kSize});
  const HolderIndex a = index.add_holder("");
  store(index, a, {1, 2}, {}, tokens_of(1, 0, 2), Tier::kGpu, 0, GroupKind::kOther);
  store(index, a, {1}, {}, tokens_of(1, 0, 1), Tier::kGpu, 1, GroupKind::kFullAttention);
  store(index, a, {1, 2, 3}, {}, tokens_of(1, 0, 3), Tier::kGpu, 2, GroupKind::kFullAttention);
  EXPECT_EQ(found(index, tokens_of(1, 0, 3)), (Found{{a, 1}}));
  remove(index, a, {1}, Tier::kGpu, 0);
  EXPECT_EQ(found(index, tokens_of(1, 0, 3)), (Found{{a, 1}}));
  remove(index, a, {1}, Tier::kGpu, 1);
  EXPECT_EQ(found(index, tokens_of(1, 0, 3)), Found{});
}

TEST(EngineIndex, BlocksWithoutTokensFindTheirPlaceOnceTheyAreTold) {
  EngineIndex index({.block_size = kSize});
  const HolderIndex a = index.add_holder("");
  store(index, a, {2}, 1, tokens_of(1, 1, 2));  // this parent is not known
  EXPECT_EQ(index.counters().blocks_unplaced, 1U);
  std::vector<EngineMatch> matches;
  index.match_hashes(std::vector<ShortKey>{2}, matches);
  EXPECT_EQ(matches.size(), 1U);
  store(index, a, {1, 2}, {}, tokens_of(1, 0, 2));
  EXPECT_EQ(found(index, tokens_of(1, 0, 2)), (Found{{a, 2}}));
  remove(index, a, {2});
  EXPECT_EQ(found(index, tokens_of(1, 0, 2)), (Found{{a, 1}}));
  EXPECT_EQ(index.num_blocks(), 1U);
}

TEST(EngineIndex, MemoryHasABound) {
  EngineIndex index({.block_size = kSize, .blocks_per_holder_max = 3});
  const HolderIndex a = index.add_holder("");
  store(index, a, {1, 2, 3, 4, 5}, {}, tokens_of(1, 0, 5));
  EXPECT_EQ(index.num_blocks(), 3U);
  EXPECT_EQ(index.counters().blocks_dropped, 2U);
}

/// Compares the index with plain sets, with random engines, hashes, tiers, removals, clears and deaths.
TEST(EngineIndex, DoesWhatAPlainModelDoes) {
  constexpr std::uint32_t kPrompts = 12, kBlocks = 8, kHolders = 6;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    std::mt19937_64 random(seed);
    EngineIndex index({.block_size = kSize, .index = {.seed = seed}});
    std::vector<HolderIndex> holders;
    for (std::uint32_t i = 0; i < kHolders; ++i) holders.push_back(index.add_holder(""));
    using Place = std::tuple<std::uint32_t, std::uint32_t, Tier>;  // prompt, block, tier
    std::vector<std::set<Place>> model(kHolders);
    // Engines form pairs that use the same hashes. Parents need no hashes of their own, because each prompt is a
    // separate chain.
    const auto hash = [&](std::uint32_t who, std::uint32_t prompt, std::uint32_t block) {
      return std::uint64_t{who / 2 + 1} << 32 | prompt << 8 | block;
    };
    for (int step = 0; step < 3000; ++step) {
      const std::uint32_t who = random() % kHolders, prompt = random() % kPrompts;
      const Tier tier = static_cast<Tier>(random() % 3);
      const std::uint32_t from = random() % kBlocks, to = from + 1 + random() % (kBlocks - from);
      std::vector<ShortKey> hashes;
      for (std::uint32_t block = from; block < to; ++block) hashes.push_back(hash(who, prompt, block));
      switch (random() % 20) {
        case 0:
          index.clear(holders[who]);
          model[who].clear();
          break;
        case 1:
          index.remove_holder(holders[who]);
          holders[who] = index.add_holder("");
          model[who].clear();
          break;
        case 2:
        case 3:
        case 4:
        case 5:
        case 6:
        case 7:
        case 8:
          for (std::uint32_t block = from; block < to; ++block) model[who].erase({prompt, block, tier});
          remove(index, holders[who], hashes, tier);
          break;
        default:
          // Stores from the first block on, so that the parent is always known.
          hashes.clear();
          for (std::uint32_t block = 0; block < to; ++block) {
            hashes.push_back(hash(who, prompt, block));
            model[who].insert({prompt, block, tier});
          }
          store(index, holders[who], hashes, {}, tokens_of(prompt, 0, to), tier);
      }
      if (random() % 4 == 0) index.tidy(random() % 64);
      if (step % 10 != 0) continue;
      const std::uint32_t asked = random() % kPrompts;
      Found expected;
      std::size_t num_blocks = 0;
      for (std::uint32_t i = 0; i < kHolders; ++i) {
        std::uint32_t length = 0;
        const auto has = [&](std::uint32_t block) {
          return model[i].contains({asked, block, Tier::kGpu}) || model[i].contains({asked, block, Tier::kHost}) ||
                 model[i].contains({asked, block, Tier::kDisk});
        };
        while (length < kBlocks && has(length)) ++length;
        if (length > 0) expected[holders[i]] = length;
        num_blocks += model[i].size();
      }
      ASSERT_EQ(found(index, tokens_of(asked, 0, kBlocks)), expected) << "seed " << seed << ", step " << step;
      ASSERT_EQ(index.num_blocks(), num_blocks);
      std::vector<EngineMatch> matches;
      std::vector<ShortKey> all;
      for (std::uint32_t block = 0; block < kBlocks; ++block) all.push_back(hash(who, asked, block));
      index.match_hashes(all, matches);
      for (const EngineMatch& match : matches) {
        if (match.holder == holders[who]) {
          ASSERT_EQ(match.up_to_tier[kNumTiers - 1], expected[holders[who]]) << "seed " << seed << ", step " << step;
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvferry::controller
