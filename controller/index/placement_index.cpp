#include "controller/index/placement_index.h"

#include <algorithm>
#include <utility>

#include "transport/base/check.h"

namespace kvferry::controller {

template <class Key>
NodeIndex PlacementIndex<Key>::add_node(std::uint32_t num_reached) {
  if (free_.empty()) {
    nodes_.push_back({.num_reached = num_reached});
    digests_.emplace_back();
    return static_cast<NodeIndex>(nodes_.size() - 1);
  }
  const NodeIndex node = free_.back();
  free_.pop_back();
  nodes_[node] = Node{.num_reached = num_reached};
  return node;
}

template <class Key>
void PlacementIndex<Key>::show_node(NodeIndex node) {
  KVFERRY_CHECK(nodes_[node].num_reached == kHidden,
                "node number {} is shown to lookups again, but was not hidden from them", node);
  nodes_[node].num_reached = 0;
}

template <class Key>
void PlacementIndex<Key>::remove_node(NodeIndex node) {
  KVFERRY_CHECK(is_alive(node), "node number {} is removed from the index twice", node);
  nodes_[node] = Node{.num_reached = kNever};
  (num_placements(node) == 0 ? free_ : removed_).push_back(node);
  digests_[node] = TierDigests{};
}

template <class Key>
bool PlacementIndex<Key>::add_one(NodeIndex node, Tier tier, const Key& key, Cursor& cursor, bool& is_known) {
  if (HolderSets::Id* set = map_.find_place(key, cursor)) {
    if (!sets_.add(*set, Placement(node, tier))) return false;
  } else {
    HolderSets::Id alone = 0;
    sets_.add(alone, Placement(node, tier));
    map_.insert(key, alone);
    cursor = {};
    is_known = false;
  }
  digests_[node][static_cast<std::size_t>(tier)].add(key);
  return true;
}

template <class Key>
std::size_t PlacementIndex<Key>::remove_one(NodeIndex node, Tiers tiers, const Key& key, Cursor& cursor) {
  HolderSets::Id* set = map_.find_place(key, cursor);
  if (set == nullptr) return 0;
  HolderSets::Id left = *set;
  std::size_t num_removed = 0;
  for (std::size_t tier = tiers.first; tier < tiers.end; ++tier) {
    if (!sets_.remove(left, Placement(node, static_cast<Tier>(tier)))) continue;
    digests_[node][tier].remove(key);
    ++num_removed;
  }
  if (left == 0)
    map_.erase(cursor);
  else
    *set = left;
  return num_removed;
}

template <class Key>
std::size_t PlacementIndex<Key>::remove(NodeIndex node, Tiers tiers, std::span<const Key> keys) {
  std::size_t num_removed = 0;
  for (; !keys.empty(); keys = keys.subspan(std::min(kKeysPerPiece, keys.size()))) {
    Cursor cursor;
    std::size_t num_removed_here = 0;
    for (const Key& key : keys.first(std::min(kKeysPerPiece, keys.size())))
      num_removed_here += remove_one(node, tiers, key, cursor);
    map_.finish_erasing();
    if (num_removed_here > 0) tidy(num_removed_here * kTidyPerChange);
    num_removed += num_removed_here;
  }
  return num_removed;
}

template <class Key>
void PlacementIndex<Key>::restore(std::span<const Key> keys, std::span<const Placement> holders) {
  if (keys.empty() || holders.empty()) return;
  HolderSets::Id set = sets_.make(holders);
  TierDigest fresh;
  fetch(keys.first(std::min(kKeysPerPiece, keys.size())));
  for (std::size_t begin = 0; begin < keys.size(); begin += kKeysPerPiece) {
    const std::size_t end = std::min(keys.size(), begin + kKeysPerPiece);
    fetch(keys.subspan(end, std::min(kKeysPerPiece, keys.size() - end)));
    std::size_t num_new = 0;
    for (const Key& key : keys.subspan(begin, end - begin)) {
      if (map_.find(key) == 0) {
        map_.insert(key, sets_.make_again(set));
        fresh.add(key);
        ++num_new;
        continue;
      }
      for (const Placement holder : holders) {
        Cursor cursor;
        bool is_known = true;
        add_one(holder.node(), holder.tier(), key, cursor, is_known);
      }
    }
    if (map_.is_crowded()) tidy(num_new * kTidyPerChange);
  }
  sets_.release(set);
  for (const Placement holder : holders) {
    TierDigest& digest = digests_[holder.node()][static_cast<std::size_t>(holder.tier())];
    digest.num_keys += fresh.num_keys;
    digest.xor_of_keys ^= fresh.xor_of_keys;
  }
}

template <class Key>
bool PlacementIndex<Key>::holds(NodeIndex node, Tier tier, const Key& key) const {
  const std::span<const Placement> holders = holders_of(key);
  return std::binary_search(holders.begin(), holders.end(), Placement(node, tier));
}

/// Begins a run, which is a series of keys with the same holders; nodes are visited only where a run begins or ends.
/// Returns false if no node has keys[0 .. begin].
template <class Key>
bool PlacementIndex<Key>::begin_run(HolderSets::Id set, std::uint32_t begin) {
  run_.clear();
  for (const Placement placement : sets_.members(set)) {
    Node& node = nodes_[placement.node()];
    if (node.num_reached != begin || (!run_.empty() && run_.back() == placement.node())) continue;
    node.tier = std::max(node.tier, placement.tier());
    run_.push_back(placement.node());
  }
  return !run_.empty();
}

template <class Key>
void PlacementIndex<Key>::end_run(std::uint32_t end) {
  for (const NodeIndex node : run_) nodes_[node].num_reached = end;
}

template <class Key>
void PlacementIndex<Key>::lookup(std::span<const Key> keys, std::optional<NodeIndex> asker,
                                 std::vector<PrefixMatch>& matches) {
  matches.clear();
  if (keys.empty()) return;
  // During this lookup the asking node is treated as removed, so that it is not found.
  const std::uint32_t asker_reached = asker ? std::exchange(nodes_[*asker].num_reached, kNever) : 0;
  Cursor cursor;
  HolderSets::Id set = map_.find(keys[0], cursor);
  if (set != 0 && begin_run(set, 0)) {
    for (const NodeIndex node : run_) matches.push_back({node, 0, Tier::kGpu});
    for (std::uint32_t i = 1;; ++i) {
      if (i == keys.size()) {
        end_run(i);
        break;
      }
      const HolderSets::Id next = map_.find(keys[i], cursor);
      if (next == set) continue;
      end_run(i);
      set = next;
      if (set == 0 || !begin_run(set, i)) break;
    }
  }
  for (PrefixMatch& match : matches) {
    Node& node = nodes_[match.node];
    match.num_keys = std::exchange(node.num_reached, 0);
    match.tier = std::exchange(node.tier, Tier::kGpu);
  }
  if (asker) nodes_[*asker].num_reached = asker_reached;
}

template <class Key>
HolderSets::Id PlacementIndex<Key>::without_removed(HolderSets::Id set) {
  for (std::size_t i = 0; i < sets_.members(set).size();) {
    const Placement placement = sets_.members(set)[i];
    if (is_alive(placement.node()))
      ++i;
    else
      sets_.remove(set, placement);
  }
  return set;
}

template <class Key>
bool PlacementIndex<Key>::tidy(std::size_t num_lines) {
  typename KeyMap<Key>::Clean clean;
  if (!removed_.empty()) {
    clean = [this](HolderSets::Id set) { return without_removed(set); };
    if (!map_.in_sweep()) {
      map_.begin_sweep();
      num_removed_seen_ = removed_.size();
    }
  }
  const bool is_busy = map_.tidy(num_lines, clean);
  if (!removed_.empty() && !map_.in_sweep()) {
    const auto seen_end = removed_.begin() + static_cast<std::ptrdiff_t>(num_removed_seen_);
    free_.insert(free_.end(), removed_.begin(), seen_end);
    removed_.erase(removed_.begin(), seen_end);
  }
  return is_busy || !removed_.empty();
}

template class PlacementIndex<ShortKey>;
template class PlacementIndex<ChunkKey>;

}  // namespace kvferry::controller
