// Compares the placement index with a model that searches a std::map, while resizes and sweeps are in progress all the
// time.
#include "controller/index/placement_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "tests/controller/fixtures.h"

namespace kvferry::controller {
namespace {

template <class Key>
Key make_key(std::uint32_t number);
template <>
ShortKey make_key<ShortKey>(std::uint32_t number) {
  return number;
}
template <>
ChunkKey make_key<ChunkKey>(std::uint32_t number) {
  return key_of(number);
}

template <class Key>
class Model {
 public:
  explicit Model(unsigned seed, std::size_t shared_sets_max)
      : random_(seed), index_({.seed = seed, .shared_sets_max = shared_sets_max}) {
    for (std::uint32_t i = 0; i < kNumKeys; ++i) keys_.push_back(make_key<Key>(i));
    for (int i = 0; i < 5; ++i) nodes_.push_back(index_.add_node());
  }

  void step() {
    const std::uint32_t dice = draw(100);
    const NodeIndex node = nodes_[draw(static_cast<std::uint32_t>(nodes_.size()))];
    const auto tier = static_cast<Tier>(draw(kNumTiers));
    const std::uint32_t begin = draw(kNumKeys);
    const std::span<const Key> batch(keys_.data() + begin, draw(std::min(60U, kNumKeys - begin)));
    if (dice < 30) return add(node, tier, batch);
    if (dice < 50) return dice % 2 == 0 ? remove(node, tier, batch) : remove_everywhere(node, batch);
    if (dice < 53) return restart(node);
    if (dice < 56) return show(node);
    if (dice < 60) {
      index_.tidy(1 + draw(20));
      return;
    }
    lookup(node, batch);
  }

  /// Finishes all tidying, then checks that exactly the placements of the living nodes are stored.
  void check_at_rest() {
    while (index_.tidy(1000)) {
    }
    std::set<Key> held;
    std::set<std::set<Placement>> distinct;
    for (const auto& [key, placements] : placements_) {
      if (placements.empty()) continue;
      held.insert(key);
      distinct.insert(placements);
    }
    ASSERT_EQ(index_.num_keys(), held.size());
    if (index_.sets().num_single() == 0) {
      ASSERT_EQ(index_.sets().num_shared(), distinct.size());
    }
    for (const NodeIndex node : nodes_) {
      ASSERT_EQ(index_.num_placements(node), count(node));
      ASSERT_EQ(index_.digests(node), digests_of(node));
    }
  }
  std::size_t num_matches() const { return num_matches_; }
  std::size_t num_single_seen() const { return num_single_seen_; }

 private:
  static constexpr std::uint32_t kNumKeys = 400;

  std::uint32_t draw(std::uint32_t end) { return static_cast<std::uint32_t>(random_() % end); }
  std::size_t count(NodeIndex node) const {
    std::size_t num_placements = 0;
    for (const auto& [key, placements] : placements_)
      num_placements += static_cast<std::size_t>(
          std::count_if(placements.begin(), placements.end(), [&](Placement p) { return p.node() == node; }));
    return num_placements;
  }

  TierDigests digests_of(NodeIndex node) const {
    TierDigests digests;
    for (const auto& [key, placements] : placements_) {
      std::uint64_t first_bytes;
      std::memcpy(&first_bytes, &key, sizeof first_bytes);
      for (const Placement placement : placements) {
        if (placement.node() != node) continue;
        TierDigest& digest = digests[static_cast<std::size_t>(placement.tier())];
        ++digest.num_keys;
        digest.xor_of_keys ^= first_bytes;
      }
    }
    return digests;
  }

  void add(NodeIndex node, Tier tier, std::span<const Key> batch) {
    using Outcome = typename PlacementIndex<Key>::Outcome;
    const std::size_t room = draw(3) == 0 ? draw(60) : 60;
    std::size_t num_new = 0;
    std::vector<Outcome> expected;
    for (const Key& key : batch) {
      const bool is_known = placements_[key].contains({node, tier});
      expected.push_back(is_known ? Outcome::kKnown : num_new < room ? Outcome::kNew : Outcome::kNoRoom);
      if (expected.back() != Outcome::kNew) continue;
      placements_[key].insert({node, tier});
      ++num_new;
    }
    std::vector<Outcome> told;
    ASSERT_EQ(index_.add(node, tier, batch, room,
                         [&](std::size_t i, Outcome outcome) {
                           ASSERT_EQ(i, told.size());
                           told.push_back(outcome);
                         }),
              num_new);
    ASSERT_EQ(told, expected);
    num_single_seen_ += index_.sets().num_single();
  }
  void remove(NodeIndex node, Tier tier, std::span<const Key> batch) {
    std::size_t num_gone = 0;
    for (const Key& key : batch) num_gone += placements_[key].erase({node, tier});
    ASSERT_EQ(index_.remove(node, tier, batch), num_gone);
  }
  void remove_everywhere(NodeIndex node, std::span<const Key> batch) {
    std::size_t num_gone = 0;
    for (const Key& key : batch)
      num_gone += std::erase_if(placements_[key], [&](Placement p) { return p.node() == node; });
    ASSERT_EQ(index_.remove(node, batch), num_gone);
  }
  void restart(NodeIndex node) {
    index_.remove_node(node);
    std::erase(nodes_, node);
    for (auto& [key, placements] : placements_)
      std::erase_if(placements, [&](Placement p) { return p.node() == node; });
    hidden_.erase(node);
    while (nodes_.size() < 5 || draw(4) == 0) {
      const bool is_hidden = draw(5) == 0;
      nodes_.push_back(is_hidden ? index_.add_hidden_node() : index_.add_node());
      if (is_hidden) hidden_.insert(nodes_.back());
    }
    for (const NodeIndex alive : nodes_) ASSERT_TRUE(index_.is_alive(alive));
    ASSERT_EQ(std::set<NodeIndex>(nodes_.begin(), nodes_.end()).size(), nodes_.size());
  }
  void show(NodeIndex node) {
    ASSERT_EQ(index_.is_visible(node), !hidden_.contains(node));
    if (hidden_.erase(node) > 0) index_.show_node(node);
  }
  void lookup(NodeIndex asker, std::span<const Key> keys) {
    const bool has_asker = draw(2) == 0;
    std::vector<PrefixMatch> matches;
    index_.lookup(keys, has_asker ? std::optional(asker) : std::nullopt, matches);
    std::sort(matches.begin(), matches.end(), [](auto& a, auto& b) { return a.node < b.node; });
    auto match = matches.begin();
    std::vector<NodeIndex> in_order = nodes_;
    std::sort(in_order.begin(), in_order.end());
    for (const NodeIndex node : in_order) {
      if (hidden_.contains(node) || (has_asker && node == asker)) continue;
      std::uint32_t num_keys = 0;
      Tier slowest = Tier::kGpu;
      for (; num_keys < keys.size(); ++num_keys) {
        const std::set<Placement>& placements = placements_[keys[num_keys]];
        const auto fastest = placements.lower_bound({node, Tier::kGpu});
        if (fastest == placements.end() || fastest->node() != node) break;
        slowest = std::max(slowest, fastest->tier());
      }
      if (num_keys == 0) continue;
      ASSERT_NE(match, matches.end());
      ASSERT_EQ(match->node, node);
      ASSERT_EQ(match->num_keys, num_keys);
      ASSERT_EQ(match->tier, slowest);
      ++match;
      ++num_matches_;
    }
    ASSERT_EQ(match, matches.end());
  }

  std::mt19937_64 random_;
  PlacementIndex<Key> index_;
  std::vector<Key> keys_;
  std::vector<NodeIndex> nodes_;
  std::set<NodeIndex> hidden_;  // hidden nodes of nodes_
  std::map<Key, std::set<Placement>> placements_;
  std::size_t num_matches_ = 0;
  std::size_t num_single_seen_ = 0;
};

template <class Key>
class PlacementIndexTest : public ::testing::Test {};
using Keys = ::testing::Types<ShortKey, ChunkKey>;
TYPED_TEST_SUITE(PlacementIndexTest, Keys);

TYPED_TEST(PlacementIndexTest, AnswersAsTheModelDoes) {
  std::size_t num_single_seen = 0;
  for (unsigned seed = 1; seed <= 60; ++seed) {
    Model<TypeParam> model(seed, std::size_t{1} << (seed % 3 * 8));  // room for 1, 256 or 65536 shared sets
    for (int step = 0; step < 1'000; ++step) {
      model.step();
      if (step % 200 == 199) model.check_at_rest();
      if (this->HasFatalFailure()) FAIL() << "seed " << seed << ", step " << step;
    }
    EXPECT_GT(model.num_matches(), 300U) << "seed " << seed << " asked nothing worth asking";
    num_single_seen += model.num_single_seen();
  }
  EXPECT_GT(num_single_seen, 10'000U);
}

TYPED_TEST(PlacementIndexTest, RandomReplicasOnAThousandNodesShareNothingAndStayCheap) {
  constexpr std::uint32_t kNumNodes = 1024;
  constexpr std::uint32_t kNumKeys = 200'000;
  constexpr std::size_t kSharedMax = 4096 + 1000;
  PlacementIndex<TypeParam> index({.seed = 3, .shared_sets_max = kSharedMax});
  for (std::uint32_t i = 0; i < kNumNodes; ++i) index.add_node();
  std::mt19937 random(1);
  std::map<std::uint32_t, std::set<Placement>> some;
  for (std::uint32_t key = 0; key < kNumKeys; ++key) {
    for (std::uint32_t i = 1 + random() % 4; i > 0; --i) {
      const Placement placement(random() % kNumNodes, static_cast<Tier>(random() % kNumTiers));
      const TypeParam one[] = {make_key<TypeParam>(key)};
      index.add(placement.node(), placement.tier(), one);
      if (key % 100 == 0) some[key].insert(placement);
    }
  }
  EXPECT_LE(index.sets().num_shared(), kSharedMax + 4096);  // sets with one placement are always shared
  EXPECT_GT(index.sets().num_single(), kNumKeys / 2);
  for (const auto& [key, placements] : some) {
    const std::span<const Placement> holders = index.holders_of(make_key<TypeParam>(key));
    ASSERT_EQ(std::set<Placement>(holders.begin(), holders.end()), placements);
  }
  for (NodeIndex node = 0; node < kNumNodes; ++node) index.remove_node(node);
  while (index.tidy(1000)) {
  }
  EXPECT_EQ(index.num_keys(), 0U);
  EXPECT_EQ(index.sets().num_shared() + index.sets().num_single(), 0U);
}

TYPED_TEST(PlacementIndexTest, ADeadNodeIsInvisibleAtOnceAndItsPlaceIsTakenOnlyWhenNothingOfItIsLeft) {
  PlacementIndex<TypeParam> index({.seed = 1});
  const NodeIndex dead = index.add_node();
  const NodeIndex other = index.add_node();
  std::vector<TypeParam> keys;
  for (std::uint32_t i = 0; i < 20'000; ++i) keys.push_back(make_key<TypeParam>(i));
  index.add(dead, Tier::kHost, std::span<const TypeParam>(keys));
  index.add(other, Tier::kDisk, std::span<const TypeParam>(keys).first(10));
  while (index.tidy(1000)) {
  }
  index.remove_node(dead);
  std::vector<PrefixMatch> matches;
  index.lookup(keys, std::nullopt, matches);
  ASSERT_EQ(matches.size(), 1U);
  EXPECT_EQ(matches[0].node, other);
  EXPECT_EQ(matches[0].num_keys, 10U);
  EXPECT_EQ(matches[0].tier, Tier::kDisk);
  std::size_t num_turns = 0;
  bool was_reused = false;
  for (; index.tidy(100); ++num_turns) {
    if (index.num_keys() <= 10) continue;
    was_reused = was_reused || index.add_node() == dead;
    ASSERT_FALSE(was_reused);
  }
  EXPECT_GT(num_turns, 40U) << "one call did too much";
  EXPECT_EQ(index.num_keys(), 10U);
  EXPECT_EQ(index.add_node(), dead);
  index.lookup(keys, other, matches);
  EXPECT_TRUE(matches.empty());
}

}  // namespace
}  // namespace kvferry::controller
