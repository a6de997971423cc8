// Which node holds which keys in which tier: what look-ups run on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "controller/index/holder_sets.h"
#include "controller/index/key_map.h"
#include "controller/protocol/tier_digest.h"

namespace kvferry::controller {

/// A node that holds keys[0 .. num_keys) of a look-up, num_keys > 0.
struct PrefixMatch {
  NodeIndex node = 0;
  std::uint32_t num_keys = 0;
  Tier tier = Tier::kGpu;  // the slowest that it takes to read them, each from the fastest that has it
};

struct IndexOptions {
  std::uint64_t seed = 0;               // of hashes; unknown to whoever chooses keys
  std::size_t shared_sets_max = 65536;  // HolderSets
};

/// Key: ShortKey or ChunkKey. Threads: one at a time.
/// A node that is removed is invisible at once, whatever it held; the memory comes back bit by bit with later changes
/// and tidy(). So does the table's resizing. No call does more of such work than of its own by more than a few times.
template <class Key>
class PlacementIndex {
 public:
  explicit PlacementIndex(IndexOptions options) : map_(options.seed), sets_(options.shared_sets_max) {}

  NodeIndex add_node() { return add_node(0); }
  /// One that no look-up sees before show_node().
  NodeIndex add_hidden_node() { return add_node(kHidden); }
  void show_node(NodeIndex node);
  void remove_node(NodeIndex node);

  /// How many were news. Keys that are asked for together should come together and in that order.
  std::size_t add(NodeIndex node, Tier tier, std::span<const Key> keys) {
    return add(node, tier, keys, keys.size(), [](std::size_t, Outcome) {});
  }
  enum class Outcome { kNew, kKnown, kNoRoom };
  /// At most `room` new ones are taken. Tells `told(i, outcome)` of each.
  template <class Told>
  std::size_t add(NodeIndex node, Tier tier, std::span<const Key> keys, std::size_t room, const Told& told);
  std::size_t remove(NodeIndex node, Tier tier, std::span<const Key> keys) {
    const auto number = static_cast<std::size_t>(tier);
    return remove(node, Tiers{number, number + 1}, keys);
  }
  std::size_t remove(NodeIndex node, std::span<const Key> keys) { return remove(node, Tiers{0, kNumTiers}, keys); }

  /// Room for so many keys at once; only while there are none.
  void reserve(std::size_t num_keys) { map_.reserve(num_keys); }
  /// All of the keys lie on all of `holders`, which are in order and alive. Quicker than to add them one by one.
  void restore(std::span<const Key> keys, std::span<const Placement> holders);

  using Walk = typename KeyMap<Key>::Walk;
  /// KeyMap's; `see(key, set)` gets sets that sets() knows until the next change.
  void set_pinned(bool is_pinned) { map_.set_pinned(is_pinned); }
  template <class See>
  bool walk(Walk& at, std::size_t budget, const See& see) const {
    return map_.walk(at, budget, see);
  }

  bool holds(NodeIndex node, Tier tier, const Key& key) const;
  /// Who has this one key, removed and hidden nodes among them: ask is_visible().
  std::span<const Placement> holders_of(const Key& key) const { return sets_.members(map_.find(key)); }
  bool is_alive(NodeIndex node) const { return nodes_[node].num_reached != kNever; }
  bool is_visible(NodeIndex node) const { return nodes_[node].num_reached < kHidden; }
  const TierDigests& digests(NodeIndex node) const { return digests_[node]; }
  std::size_t num_placements(NodeIndex node) const {
    std::size_t num_placements = 0;
    for (const TierDigest& digest : digests_[node]) num_placements += digest.num_keys;
    return num_placements;
  }

  /// Every node but `asker` that has keys[0], in no particular order. Ends at the first key that no candidate has.
  /// Cost: a step a key where keys came in this order, else a search; where the holders change from a key to the next,
  /// linear in the new ones.
  void lookup(std::span<const Key> keys, std::optional<NodeIndex> asker, std::vector<PrefixMatch>& matches);

  /// Tells `seen(first, end, placements)` of each run of keys that lie in the same places, in order and removed and
  /// hidden nodes among them, until one lies nowhere or `seen` says false.
  template <class Seen>
  void walk(std::span<const Key> keys, const Seen& seen);

  /// Looks at about `num_lines` cache lines. False: nothing is left to do.
  bool tidy(std::size_t num_lines);

  std::size_t num_keys() const { return map_.size(); }  // some of them may have only removed nodes
  const HolderSets& sets() const { return sets_; }

 private:
  static constexpr std::uint32_t kNever = ~std::uint32_t{0};  // no look-up is that long
  static constexpr std::uint32_t kHidden = kNever - 1;        // nor that; alive all the same
  struct Node {
    std::uint32_t num_reached = 0;  // of the look-up in progress: keys[0 .. num_reached) are here
    Tier tier = Tier::kGpu;         // likewise
  };
  using Cursor = typename KeyMap<Key>::Cursor;
  struct Tiers {
    std::size_t first, end;
  };
  static constexpr std::size_t kKeysFetchedFirst = 8;
  static constexpr std::size_t kKeysPerPiece = 64;  // between two rounds of tidying
  static constexpr std::size_t kTidyPerChange = 4;  // cache lines; a growing table is ready before it is full

  NodeIndex add_node(std::uint32_t num_reached);
  bool add_one(NodeIndex node, Tier tier, const Key& key, Cursor& cursor, bool& is_known);
  std::size_t remove_one(NodeIndex node, Tiers tiers, const Key& key, Cursor& cursor);
  std::size_t remove(NodeIndex node, Tiers tiers, std::span<const Key> keys);
  void fetch(std::span<const Key> keys) const {
    for (const Key& key : keys) map_.prefetch(key);
  }
  bool begin_run(HolderSets::Id set, std::uint32_t begin);
  void end_run(std::uint32_t end);
  HolderSets::Id without_removed(HolderSets::Id set);

  KeyMap<Key> map_;
  HolderSets sets_;
  std::vector<Node> nodes_;           // apart from their digests, which look-ups don't need
  std::vector<TierDigests> digests_;  // by node; zeros when removed
  std::vector<NodeIndex> free_;
  std::vector<NodeIndex> removed_;    // in this order; may still be in sets
  std::size_t num_removed_seen_ = 0;  // those that the sweep in progress leaves nothing of
  std::vector<NodeIndex> run_;        // of the look-up in progress: who goes on
};

template <class Key>
template <class Told>
std::size_t PlacementIndex<Key>::add(NodeIndex node, Tier tier, std::span<const Key> keys, std::size_t room,
                                     const Told& told) {
  std::size_t num_new = 0;
  for (std::size_t begin = 0; begin < keys.size(); begin += kKeysPerPiece) {
    const std::size_t end = std::min(keys.size(), begin + kKeysPerPiece);
    const std::size_t num_new_before = num_new;
    Cursor cursor;
    bool is_fetched = false;
    fetch(keys.subspan(begin, std::min(kKeysFetchedFirst, end - begin)));
    for (std::size_t i = begin; i < end; ++i) {
      if (num_new == room && !holds(node, tier, keys[i])) {
        told(i, Outcome::kNoRoom);
        continue;
      }
      bool is_known = true;
      const bool is_new = add_one(node, tier, keys[i], cursor, is_known);
      told(i, is_new ? Outcome::kNew : Outcome::kKnown);
      num_new += is_new ? 1 : 0;
      if (is_known || is_fetched) continue;
      fetch(keys.subspan(i + 1, end - i - 1));  // where one is unknown, most that follow are
      is_fetched = true;
    }
    if (num_new != num_new_before) tidy((num_new - num_new_before) * kTidyPerChange);
  }
  return num_new;
}

template <class Key>
template <class Seen>
void PlacementIndex<Key>::walk(std::span<const Key> keys, const Seen& seen) {
  Cursor cursor;
  std::size_t first = 0;
  HolderSets::Id set = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const HolderSets::Id next = map_.find(keys[i], cursor);
    if (next == set && i > 0) continue;
    if (i > 0 && !seen(first, i, sets_.members(set))) return;
    if (next == 0) return;
    first = i;
    set = next;
  }
  if (set != 0) seen(first, keys.size(), sets_.members(set));
}

extern template class PlacementIndex<ShortKey>;
extern template class PlacementIndex<ChunkKey>;

}  // namespace kvferry::controller
