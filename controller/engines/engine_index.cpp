#include "controller/engines/engine_index.h"

#include <algorithm>
#include <utility>

#include "controller/engines/block_chain.h"
#include "transport/base/check.h"

namespace kvferry::controller {
namespace {

// Limit on a holder's own_keys, the hashes that this holder uses for another block than keys_of_ does. Further such
// hashes are not stored.
constexpr std::size_t kOwnKeysMax = 1 << 16;
constexpr std::size_t kRemovalsTogetherMax = 64;  // number of queued removals at which flush() runs
constexpr std::size_t kSlotsPerChange = 8;        // number of slots of keys_of_ that each removal tidies
constexpr std::size_t kLeftBehindMin = 4096;

}  // namespace

EngineIndex::EngineIndex(EngineIndexOptions options)
    : options_(std::move(options)), index_(options_.index), keys_of_(~options_.index.seed) {}

HolderIndex EngineIndex::add_holder(std::string lora_name) {
  HolderIndex holder = static_cast<HolderIndex>(holders_.size());
  if (free_holders_.empty()) {
    holders_.emplace_back();
  } else {
    holder = free_holders_.back();
    free_holders_.pop_back();
  }
  holders_[holder].is_used = true;
  holders_[holder].lora_name = std::move(lora_name);
  give_node(holder);
  return holder;
}

void EngineIndex::give_node(HolderIndex holder) {
  const NodeIndex node = holders_[holder].node = index_.add_node();
  holder_of_node_.resize(std::max<std::size_t>(holder_of_node_.size(), node + std::size_t{1}));
  holder_of_node_[node] = holder;
}

void EngineIndex::remove_holder(HolderIndex holder) {
  clear(holder);
  index_.remove_node(holders_[holder].node);
  holders_[holder] = Holder{};
  free_holders_.push_back(holder);
}

void EngineIndex::clear(HolderIndex holder) {
  flush();
  Holder& cleared = holders_[holder];
  KVFERRY_CHECK(cleared.is_used,
                "the blocks of engine rank number {} are removed from the index, which has no such rank", holder);
  const std::size_t num_placements = index_.num_placements(cleared.node);
  cleared.own_keys.clear();
  cleared.group.reset();
  if (num_placements == 0) return;
  num_blocks_ -= num_placements;
  num_left_behind_ += num_placements;
  index_.remove_node(cleared.node);
  give_node(holder);
}

/// Returns false if the blocks belong to a layer group that is not indexed. In a model with several layer groups, each
/// group reports its own blocks, with the same hashes. Only one group of each holder is indexed: the first one that
/// reports. If that group has another kind of attention than full attention, the first group with full attention (or of
/// an unknown kind) replaces it, because groups with full attention decide whether a prefix is usable.
bool EngineIndex::counts(HolderIndex holder, const BlocksStored& blocks) {
  Holder& by = holders_[holder];
  if (!blocks.group) return true;
  const bool is_full = blocks.kind != GroupKind::kOther;
  if (!by.group || (is_full && !by.group_is_full && by.group != blocks.group)) {
    if (by.group) clear(holder);
    by.group = blocks.group;
    by.group_is_full = is_full;
  }
  return by.group == blocks.group;
}

/// Returns the key of the block with this hash; nullptr if the hash is unknown.
ShortKey* EngineIndex::key_of(Holder& holder, ShortKey hash) {
  if (!holder.own_keys.empty()) {
    if (const auto own = holder.own_keys.find(hash); own != holder.own_keys.end()) return &own->second;
  }
  return keys_of_.find(hash);
}

/// Returns a key made from the engine's hash, for a block whose tokens or parent are unknown.
ShortKey EngineIndex::unplaced_key(ShortKey hash) const {
  const std::uint32_t halves[] = {static_cast<std::uint32_t>(hash), static_cast<std::uint32_t>(hash >> 32)};
  return next_block_key(options_.index.seed ^ 0x756e706c61636564, halves, 0);
}

/// Fills chain_ with the keys of the blocks. Returns false if the block size is missing, if the number of tokens does
/// not fit the number of blocks, or if the parent has no key that was made from tokens.
bool EngineIndex::chain(Holder& holder, const BlocksStored& blocks) {
  const std::size_t size = options_.block_size;
  if (blocks.block_size != size || blocks.tokens.size() != blocks.hashes.size() * size) return false;
  const std::string_view lora_name =
      blocks.lora_name.empty() && !blocks.lora_id ? std::string_view(holder.lora_name) : blocks.lora_name;
  ShortKey key = 0;
  if (blocks.parent) {
    const ShortKey* parent = key_of(holder, *blocks.parent);
    if (parent == nullptr || *parent == unplaced_key(*blocks.parent)) return false;
    key = *parent;
  } else {
    key = root_block_key(options_.index.seed, lora_name, blocks.lora_id);
  }
  ExtraKeys extras(blocks.extra_keys, lora_name);
  for (std::size_t i = 0; i < blocks.hashes.size(); ++i) {
    const std::uint64_t salt = i == 0 && !blocks.parent ? salt_extras(blocks.cache_salt) : 0;
    key = next_block_key(key, blocks.tokens.subspan(i * size, size), extras.next() ^ salt);
    chain_[i] = key;
  }
  return true;
}

bool EngineIndex::is_held(ShortKey key) const {
  const auto placements = index_.holders_of(key);
  return std::any_of(placements.begin(), placements.end(), [&](Placement p) { return index_.is_alive(p.node()); });
}

void EngineIndex::move_placements(ShortKey from, ShortKey to) {
  const auto placements = index_.holders_of(from);
  const std::vector<Placement> moved(placements.begin(), placements.end());
  for (const Placement placement : moved) {
    if (!index_.is_alive(placement.node())) continue;
    num_blocks_ -= index_.remove(placement.node(), placement.tier(), std::span(&from, 1));
    num_blocks_ += index_.add(placement.node(), placement.tier(), std::span(&to, 1));
  }
}

/// Maps `hash` to `key`. There are three cases if `hash` is mapped to another key already. If one of the two keys is an
/// unplaced_key(), the other key, which is made from tokens, becomes both the mapped key and `key`. If no holder has
/// the mapped key, `key` replaces it. Otherwise the hash is ambiguous: the mapping stays, and own_keys of `holder` gets
/// `key`, unless own_keys is full.
void EngineIndex::bind(Holder& holder, ShortKey hash, ShortKey& key) {
  ShortKey* known = key_of(holder, hash);
  if (known == nullptr) {
    if (!keys_of_.insert(hash, key)) ++counters_.hashes_ambiguous;
    return;
  }
  if (*known == key) return;
  const ShortKey unplaced = unplaced_key(hash);
  if (key == unplaced) {  // this event lacks the tokens or the parent, but an earlier event had them
    key = *known;
  } else if (*known == unplaced) {
    *known = key;
    move_placements(unplaced, key);
  } else if (!is_held(*known)) {
    *known = key;
  } else {
    ++counters_.hashes_ambiguous;
    if (holder.own_keys.size() < kOwnKeysMax) holder.own_keys[hash] = key;
  }
}

void EngineIndex::stored(HolderIndex holder, const BlocksStored& blocks) {
  flush();
  counters_.blocks_stored += blocks.hashes.size();
  if (!counts(holder, blocks)) {
    ++counters_.other_group;
    return;
  }
  if (blocks.block_size != options_.block_size && blocks.block_size != 0) {
    ++counters_.other_block_size;
    return;
  }
  Holder& by = holders_[holder];
  const std::size_t held = index_.num_placements(by.node);
  const std::size_t room = std::min(options_.blocks_per_holder_max - std::min(options_.blocks_per_holder_max, held),
                                    options_.blocks_max - std::min(options_.blocks_max, num_blocks_));
  if (room == 0) {
    counters_.blocks_dropped += blocks.hashes.size();
    return;
  }
  for (const ShortKey hash : blocks.hashes) keys_of_.prefetch(hash);
  chain_.resize(std::max(chain_.size(), blocks.hashes.size()));
  if (!chain(by, blocks)) {
    counters_.blocks_unplaced += blocks.hashes.size();
    for (std::size_t i = 0; i < blocks.hashes.size(); ++i) chain_[i] = unplaced_key(blocks.hashes[i]);
  }
  for (std::size_t i = 0; i < blocks.hashes.size(); ++i) bind(by, blocks.hashes[i], chain_[i]);
  const std::span<const ShortKey> keys(chain_.data(), blocks.hashes.size());
  num_blocks_ += index_.add(by.node, blocks.tier, keys, room, [&](std::size_t, auto outcome) {
    if (outcome == PlacementIndex<ShortKey>::Outcome::kNoRoom) ++counters_.blocks_dropped;
  });
}

void EngineIndex::removed(HolderIndex holder, const BlocksRemoved& blocks) {
  counters_.blocks_removed += blocks.hashes.size();
  if (blocks.group && holders_[holder].group && holders_[holder].group != blocks.group) {
    ++counters_.other_group;
    return;
  }
  if (!removed_hashes_.empty() && (holder != removed_holder_ || blocks.tier != removed_tier_)) flush();
  removed_holder_ = holder;
  removed_tier_ = blocks.tier;
  for (const ShortKey hash : blocks.hashes) {
    keys_of_.prefetch(hash);
    removed_hashes_.push_back(hash);
    if (removed_hashes_.size() == kRemovalsTogetherMax) flush();
  }
}

void EngineIndex::flush() {
  if (removed_hashes_.empty()) return;
  Holder& by = holders_[removed_holder_];
  chain_.resize(std::max(chain_.size(), kRemovalsTogetherMax));
  std::size_t num_known = 0;
  for (const ShortKey hash : removed_hashes_) {
    if (const ShortKey* key = key_of(by, hash)) {
      removed_hashes_[num_known] = hash;
      chain_[num_known++] = *key;
    }
  }
  num_blocks_ -= index_.remove(by.node, removed_tier_, std::span<const ShortKey>(chain_.data(), num_known));
  for (std::size_t i = 0; i < num_known; ++i) {
    const bool has_holder = by.own_keys.empty() ? !index_.holders_of(chain_[i]).empty() : is_held(chain_[i]);
    if (has_holder) {
      ++num_left_behind_;  // if the other holders use another hash for this block, only a sweep erases this hash
    } else if (by.own_keys.erase(removed_hashes_[i]) == 0) {
      keys_of_.erase(removed_hashes_[i]);
    }
  }
  removed_hashes_.clear();
  tidy_hashes(num_known * kSlotsPerChange);
}

bool EngineIndex::tidy(std::size_t num_lines) {
  flush();
  const bool index_is_busy = index_.tidy(num_lines);
  if (!keys_of_.in_sweep() && num_left_behind_ > std::max(kLeftBehindMin, keys_of_.size() / 8)) {
    num_left_behind_ = 0;
    keys_of_.begin_sweep();
  }
  // `num_lines` limits the work, in cache lines. tidy_hashes() visits only an eighth as many slots, because each slot
  // costs a search in index_.
  return tidy_hashes(num_lines / 8) || index_is_busy;
}

bool EngineIndex::tidy_hashes(std::size_t num_slots) {
  return keys_of_.tidy(num_slots, [this](ShortKey key) { return is_held(key); });
}

}  // namespace kvferry::controller
