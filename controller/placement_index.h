// Which node holds which keys in which tier: what look-ups run on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "controller/holder_sets.h"
#include "controller/key_map.h"

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
/// and tidy(). So does the table's resizing. No call does more than a few hundred slots of such work besides its own.
template <class Key>
class PlacementIndex {
 public:
  explicit PlacementIndex(IndexOptions options) : map_(options.seed), sets_(options.shared_sets_max) {}

  NodeIndex add_node();
  void remove_node(NodeIndex node);

  /// True when it is news. A batch is faster: it fetches ahead; it returns how many were news.
  bool add(NodeIndex node, Tier tier, const Key& key);
  bool remove(NodeIndex node, Tier tier, const Key& key);
  std::size_t add(NodeIndex node, Tier tier, std::span<const Key> keys);
  std::size_t remove(NodeIndex node, Tier tier, std::span<const Key> keys);
  std::size_t remove(NodeIndex node, std::span<const Key> keys);  // from all tiers
  /// For callers that make batches of their own.
  void prefetch(const Key& key) const { map_.prefetch(key); }

  bool holds(NodeIndex node, Tier tier, const Key& key) const;
  /// Who has this one key, removed nodes among them: ask is_alive().
  std::span<const Placement> holders_of(const Key& key) const { return sets_.members(map_.find(key)); }
  bool is_alive(NodeIndex node) const { return nodes_[node].num_reached != kNever; }
  std::size_t num_placements(NodeIndex node) const { return nodes_[node].num_placements; }

  /// Every node but `asker` that has keys[0], in no particular order. Ends at the first key that no candidate has.
  /// Cost: a fetch a key; where the holders change from a key to the next, linear in the new ones.
  void lookup(std::span<const Key> keys, std::optional<NodeIndex> asker, std::vector<PrefixMatch>& matches);

  /// Looks at about `num_buckets` cache lines. False: nothing is left to do.
  bool tidy(std::size_t num_buckets);

  std::size_t num_keys() const { return map_.size(); }  // some of them may have only removed nodes
  const HolderSets& sets() const { return sets_; }

 private:
  static constexpr std::uint32_t kNever = ~std::uint32_t{0};  // no look-up is that long
  struct Node {
    std::uint32_t num_reached = 0;  // of the look-up in progress: keys[0 .. num_reached) are here
    Tier tier = Tier::kGpu;         // likewise
    std::size_t num_placements = 0;
  };
  static constexpr std::size_t kFetchAhead = 32;
  static constexpr std::size_t kBucketsPerChange = 4;  // enough for a growing table to be ready before it is full

  template <class Action>
  void for_each_fetched(std::span<const Key> keys, const Action& action);
  bool begin_run(HolderSets::Id set, std::uint32_t begin);
  void end_run(std::uint32_t end);
  HolderSets::Id without_removed(HolderSets::Id set);

  KeyMap<Key> map_;
  HolderSets sets_;
  std::vector<Node> nodes_;
  std::vector<NodeIndex> free_;
  std::vector<NodeIndex> removed_;    // in this order; may still be in sets
  std::size_t num_removed_seen_ = 0;  // those that the pass in progress leaves nothing of
  std::vector<NodeIndex> run_;        // of the look-up in progress: who goes on
};

extern template class PlacementIndex<ShortKey>;
extern template class PlacementIndex<ChunkKey>;

}  // namespace kvferry::controller
