// Index of which node holds which keys in which tier, for the controller's lookups.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "controller/index/holder_sets.h"
#include "controller/index/key_map.h"
#include "controller/protocol/values.h"

namespace kvferry::controller {

/// A node that holds keys[0 .. num_keys) of a lookup, num_keys > 0.
struct PrefixMatch {
  NodeIndex node = 0;
  std::uint32_t num_keys = 0;
  Tier tier = Tier::kGpu;  // slowest tier among the keys, where each key counts in its fastest tier
};

struct IndexOptions {
  std::uint64_t seed = 0;               // hash seed; must be unknown to clients
  std::size_t shared_sets_max = 65536;  // limit on shared sets, see HolderSets
};

/// Key: ShortKey or ChunkKey. Threads: one at a time.
/// A removed node is invisible at once. Later changes and tidy() reclaim its memory and resize the table in small
/// steps, so that no call takes more than a few times as long as its own change alone.
template <class Key>
class PlacementIndex {
 public:
  explicit PlacementIndex(IndexOptions options) : map_(options.seed), sets_(options.shared_sets_max) {}

  NodeIndex add_node() { return add_node(0); }
  /// Adds a node that lookups skip until show_node().
  NodeIndex add_hidden_node() { return add_node(kHidden); }
  void show_node(NodeIndex node);
  void remove_node(NodeIndex node);

  /// Adds the keys and returns the number of new ones. Keys that are looked up together should be added together and in
  /// the same order.
  std::size_t add(NodeIndex node, Tier tier, std::span<const Key> keys) {
    return add(node, tier, keys, keys.size(), [](std::size_t, Outcome) {});
  }
  enum class Outcome { kNew, kKnown, kNoRoom };
  /// Adds at most `room` new keys. Calls `report(i, outcome)` for each key.
  template <class Report>
  std::size_t add(NodeIndex node, Tier tier, std::span<const Key> keys, std::size_t room, const Report& report);
  /// Removes the keys from one tier of `node`. Returns the number of keys that `node` held in this tier.
  std::size_t remove(NodeIndex node, Tier tier, std::span<const Key> keys) {
    const auto number = static_cast<std::size_t>(tier);
    return remove(node, Tiers{number, number + 1}, keys);
  }
  /// Removes the keys from all tiers; returns the number of (key, tier) pairs that `node` held.
  std::size_t remove(NodeIndex node, std::span<const Key> keys) { return remove(node, Tiers{0, kNumTiers}, keys); }

  /// Makes room for `num_keys` keys. The index must be empty.
  void reserve(std::size_t num_keys) { map_.reserve(num_keys); }
  /// Adds all keys to all of `holders`, which must be sorted and alive. Faster than one add() for each holder.
  void restore(std::span<const Key> keys, std::span<const Placement> holders);

  using Walk = typename KeyMap<Key>::Walk;
  /// Same as KeyMap's set_pinned() and walk(). The set that `see(key, set)` receives is valid until the next change.
  void set_pinned(bool is_pinned) { map_.set_pinned(is_pinned); }
  template <class See>
  bool walk(Walk& at, std::size_t budget, const See& see) const {
    return map_.walk(at, budget, see);
  }

  bool holds(NodeIndex node, Tier tier, const Key& key) const;
  /// Returns the holders of one key, including removed and hidden nodes; is_alive() and is_visible() tell these apart.
  std::span<const Placement> holders_of(const Key& key) const { return sets_.members(map_.find(key)); }
  bool is_alive(NodeIndex node) const { return nodes_[node].num_reached != kNever; }
  bool is_visible(NodeIndex node) const { return nodes_[node].num_reached < kHidden; }
  const TierDigests& digests(NodeIndex node) const { return digests_[node]; }
  std::size_t num_placements(NodeIndex node) const {
    std::size_t num_placements = 0;
    for (const TierDigest& digest : digests_[node]) num_placements += digest.num_keys;
    return num_placements;
  }

  /// Finds every visible node except `asker` that has keys[0], in no particular order. Stops at the first key i for
  /// which no such node has keys[0 .. i]. The cost for each key is one step if the keys were added in this order,
  /// otherwise one search. If a key's holders differ from those of the previous key, time linear in the number of its
  /// holders is added.
  void lookup(std::span<const Key> keys, std::optional<NodeIndex> asker, std::vector<PrefixMatch>& matches);

  /// Calls `see(first, end, placements)` for each run of keys with equal placements, in order and including removed and
  /// hidden nodes, until a key has no placement or `see` returns false.
  template <class See>
  void for_each_run(std::span<const Key> keys, const See& see);

  /// Resizes, compacts and sweeps tables, about `num_lines` cache lines each. Returns false if nothing is left to do.
  bool tidy(std::size_t num_lines);

  // Returns the number of keys, including those that only removed nodes hold.
  std::size_t num_keys() const { return map_.size(); }
  const HolderSets& sets() const { return sets_; }

 private:
  // Special values of num_reached, which are too high for any lookup to reach.
  static constexpr std::uint32_t kNever = ~std::uint32_t{0};  // value for a node that was removed
  static constexpr std::uint32_t kHidden = kNever - 1;        // value for a node that is alive, but that lookups skip
  /// How far a node matches the lookup in progress, or whether it is removed or hidden.
  struct Node {
    std::uint32_t num_reached = 0;  // the node has keys[0 .. num_reached), unless this is kNever or kHidden
    Tier tier = Tier::kGpu;
  };
  using Cursor = typename KeyMap<Key>::Cursor;
  struct Tiers {
    std::size_t first, end;
  };
  static constexpr std::size_t kKeysFetchedFirst = 8;
  static constexpr std::size_t kKeysPerPiece = 64;  // number of keys after which a change may call tidy()
  // Number of cache lines to tidy for each changed key; enough to end a resize before the table is full.
  static constexpr std::size_t kTidyPerChange = 4;

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
  // [node] state of the node; its digests are stored in digests_, because lookups don't need them.
  std::vector<Node> nodes_;
  std::vector<TierDigests> digests_;  // [node] digests of the node's keys; zeros for a removed node
  std::vector<NodeIndex> free_;
  std::vector<NodeIndex> removed_;    // removed nodes that sets may still contain, oldest first
  std::size_t num_removed_seen_ = 0;  // the current sweep removes the first num_removed_seen_ of removed_ from all sets
  std::vector<NodeIndex> run_;        // nodes that hold all keys so far, in the lookup in progress
};

template <class Key>
template <class Report>
std::size_t PlacementIndex<Key>::add(NodeIndex node, Tier tier, std::span<const Key> keys, std::size_t room,
                                     const Report& report) {
  std::size_t num_new = 0;
  for (std::size_t begin = 0; begin < keys.size(); begin += kKeysPerPiece) {
    const std::size_t end = std::min(keys.size(), begin + kKeysPerPiece);
    const std::size_t num_new_before = num_new;
    Cursor cursor;
    bool is_fetched = false;
    fetch(keys.subspan(begin, std::min(kKeysFetchedFirst, end - begin)));
    for (std::size_t i = begin; i < end; ++i) {
      if (num_new == room && !holds(node, tier, keys[i])) {
        report(i, Outcome::kNoRoom);
        continue;
      }
      bool is_known = true;
      const bool is_new = add_one(node, tier, keys[i], cursor, is_known);
      report(i, is_new ? Outcome::kNew : Outcome::kKnown);
      num_new += is_new ? 1 : 0;
      if (is_known || is_fetched) continue;
      // Prefetches the buckets of the other keys, because keys after an unknown one are mostly unknown too, and each
      // unknown key needs a search in the table.
      fetch(keys.subspan(i + 1, end - i - 1));
      is_fetched = true;
    }
    if (num_new != num_new_before) tidy((num_new - num_new_before) * kTidyPerChange);
  }
  return num_new;
}

template <class Key>
template <class See>
void PlacementIndex<Key>::for_each_run(std::span<const Key> keys, const See& see) {
  Cursor cursor;
  std::size_t first = 0;
  HolderSets::Id set = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const HolderSets::Id next = map_.find(keys[i], cursor);
    if (next == set && i > 0) continue;
    if (i > 0 && !see(first, i, sets_.members(set))) return;
    if (next == 0) return;
    first = i;
    set = next;
  }
  if (set != 0) see(first, keys.size(), sets_.members(set));
}

extern template class PlacementIndex<ShortKey>;
extern template class PlacementIndex<ChunkKey>;

}  // namespace kvferry::controller
