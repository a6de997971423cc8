#include "controller/engines/engine_index.h"

#include <algorithm>
#include <utility>

#include "controller/engines/block_chain.h"
#include "transport/base/check.h"

namespace kvferry::controller {
namespace {

constexpr std::size_t kOwnKeysMax = 1 << 16;      // a holder; who needs more has hashes that mean nothing
constexpr std::size_t kRemovalsTogetherMax = 64;  // searched for together
constexpr std::size_t kSlotsPerChange = 8;        // of the map of hashes; tidied as the index tidies itself
constexpr std::size_t kLeftBehindMin = 4096;

std::uint8_t bit_of(Tier tier) { return static_cast<std::uint8_t>(1U << static_cast<unsigned>(tier)); }

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
  Holder& added = holders_[holder];
  added.node = index_.add_node();
  added.is_used = true;
  added.lora_name = std::move(lora_name);
  const NodeIndex node = added.node;
  holder_of_node_.resize(std::max<std::size_t>(holder_of_node_.size(), node + std::size_t{1}));
  holder_of_node_[node] = holder;
  return holder;
}

void EngineIndex::remove_holder(HolderIndex holder) {
  clear(holder);
  index_.remove_node(holders_[holder].node);
  holders_[holder] = Holder{};
  free_holders_.push_back(holder);
}

void EngineIndex::clear(HolderIndex holder) {
  flush();
  Holder& emptied = holders_[holder];
  KVFERRY_CHECK(emptied.is_used, "holder {} is gone", holder);
  const std::size_t num_placements = index_.num_placements(emptied.node);
  emptied.own_keys.clear();
  emptied.group.reset();
  if (num_placements == 0) return;
  num_blocks_ -= num_placements;
  num_left_behind_ += num_placements;
  index_.remove_node(emptied.node);
  emptied.node = index_.add_node();
  holder_of_node_.resize(std::max<std::size_t>(holder_of_node_.size(), emptied.node + std::size_t{1}));
  holder_of_node_[emptied.node] = holder;
}

/// Of a model with several groups of layers each tells of its own blocks, with the same hashes. A prefix is worth
/// something where the groups that attend to all of it have it: the first of those speaks for the holder. Until one is
/// seen, the first of any kind does.
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

ShortKey* EngineIndex::key_of(Holder& holder, ShortKey hash) {
  if (!holder.own_keys.empty()) {
    if (const auto own = holder.own_keys.find(hash); own != holder.own_keys.end()) return &own->second;
  }
  return keys_of_.find(hash);
}

ShortKey EngineIndex::unplaced_key(ShortKey hash) const {
  const std::uint32_t halves[] = {static_cast<std::uint32_t>(hash), static_cast<std::uint32_t>(hash >> 32)};
  return next_block_key(options_.index.seed ^ 0x756e706c61636564, halves, 0);
}

ShortKey EngineIndex::root_of(std::string_view lora_name, std::optional<std::uint64_t> lora_id) const {
  return root_block_key(options_.index.seed, lora_name, lora_id);
}

/// Fills chain_ with the keys of the blocks. False: their tokens don't tell.
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
    key = root_of(lora_name, blocks.lora_id);
  }
  ExtraKeys extras(blocks.extra_keys, lora_name);
  for (std::size_t i = 0; i < blocks.hashes.size(); ++i) {
    key = next_block_key(key, blocks.tokens.subspan(i * size, size), extras.next());
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

/// Remembers that `hash` stands for `key`; where it stands for another one already, the better founded of the two wins.
void EngineIndex::bind(Holder& holder, ShortKey hash, ShortKey& key) {
  ShortKey* known = key_of(holder, hash);
  if (known == nullptr) {
    if (!keys_of_.insert(hash, key)) ++counters_.hashes_ambiguous;
    return;
  }
  if (*known == key) return;
  const ShortKey unplaced = unplaced_key(hash);
  if (key == unplaced) {  // no tokens this time, or no parent: what was told earlier still holds
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
  if (!gone_hashes_.empty() && (holder != gone_holder_ || blocks.tier != gone_tier_)) flush();
  gone_holder_ = holder;
  gone_tier_ = blocks.tier;
  for (const ShortKey hash : blocks.hashes) {
    keys_of_.prefetch(hash);
    gone_hashes_.push_back(hash);
    if (gone_hashes_.size() == kRemovalsTogetherMax) flush();
  }
}

void EngineIndex::flush() {
  if (gone_hashes_.empty()) return;
  Holder& by = holders_[gone_holder_];
  chain_.resize(std::max(chain_.size(), kRemovalsTogetherMax));
  std::size_t num_known = 0;
  for (const ShortKey hash : gone_hashes_) {
    if (const ShortKey* key = key_of(by, hash)) {
      gone_hashes_[num_known] = hash;
      chain_[num_known++] = *key;
    }
  }
  num_blocks_ -= index_.remove(by.node, gone_tier_, std::span<const ShortKey>(chain_.data(), num_known));
  for (std::size_t i = 0; i < num_known; ++i) {
    const std::span<const Placement> left = index_.holders_of(chain_[i]);
    if (by.own_keys.empty() ? left.empty() : !is_held(chain_[i])) {
      if (by.own_keys.erase(gone_hashes_[i]) == 0) keys_of_.erase(gone_hashes_[i]);
    } else {
      // Others hold it, perhaps by another hash; then nobody would ever take this one back.
      ++num_left_behind_;
    }
  }
  gone_hashes_.clear();
  keys_of_.tidy(num_known * kSlotsPerChange, [&](ShortKey key) { return is_held(key); });
}

/// Of the keys in chain_.
void EngineIndex::match(std::vector<EngineMatch>& matches) {
  matches.clear();
  walkers_.clear();
  std::size_t num_walked = 0;
  const auto stop = [&](Walker& walker, std::uint8_t alone, std::uint8_t together, std::size_t at) {
    EngineMatch& match = matches[walker.match];
    for (unsigned tier = 0; tier < kNumTiers; ++tier) {
      if (walker.alone & ~alone & 1U << tier) match.in_tier[tier] = static_cast<std::uint32_t>(at);
      if (walker.together & ~together & 1U << tier) match.up_to_tier[tier] = static_cast<std::uint32_t>(at);
    }
    walker.alone &= alone;
    walker.together &= together;
  };
  index_.walk(chain_, [&](std::size_t first, std::size_t end, std::span<const Placement> placements) {
    if (first == 0) {
      for (const Placement placement : placements) {
        if (!index_.is_visible(placement.node())) continue;
        if (!walkers_.empty() && walkers_.back().node == placement.node()) continue;
        walkers_.push_back({placement.node(), 0xf, 0xf, static_cast<std::uint32_t>(matches.size())});
        matches.push_back({.holder = holder_of_node_[placement.node()]});
      }
    }
    std::size_t num_going_on = 0;
    auto at = placements.begin();  // both are in the order of nodes
    for (Walker walker : walkers_) {
      std::uint8_t alone = 0;
      while (at != placements.end() && at->node() < walker.node) ++at;
      for (; at != placements.end() && at->node() == walker.node; ++at) alone |= bit_of(at->tier());
      std::uint8_t together = 0;  // a tier, and all that are slower
      for (unsigned tier = 0; tier < kNumTiers; ++tier)
        together |= static_cast<std::uint8_t>((alone & ((2U << tier) - 1)) != 0 ? 1U << tier : 0);
      stop(walker, alone, together, first);
      if (walker.together != 0) walkers_[num_going_on++] = walker;
    }
    walkers_.resize(num_going_on);
    num_walked = end;
    return num_going_on > 0;
  });
  for (Walker& walker : walkers_) stop(walker, 0, 0, num_walked);
}

void EngineIndex::match_tokens(std::span<const std::uint32_t> tokens, const PromptSalt& salt,
                               std::vector<EngineMatch>& matches) {
  flush();
  const std::size_t size = options_.block_size;
  chain_.resize(tokens.size() / size);
  ShortKey key = root_of(salt.lora_name, salt.lora_id);
  for (std::size_t i = 0; i < chain_.size(); ++i) {
    key = next_block_key(key, tokens.subspan(i * size, size), i == 0 ? salt_extras(salt.cache_salt) : 0);
    chain_[i] = key;
  }
  match(matches);
}

void EngineIndex::match_hashes(std::span<const ShortKey> hashes, std::vector<EngineMatch>& matches) {
  flush();
  chain_.clear();
  for (const ShortKey hash : hashes) {
    const ShortKey* key = keys_of_.find(hash);
    if (key == nullptr) break;
    chain_.push_back(*key);
  }
  match(matches);
}

bool EngineIndex::tidy(std::size_t num_lines) {
  flush();
  const bool index_is_busy = index_.tidy(num_lines);
  if (!keys_of_.in_sweep() && num_left_behind_ > std::max(kLeftBehindMin, keys_of_.size() / 8)) {
    num_left_behind_ = 0;
    keys_of_.begin_sweep();
  }
  // Each of its slots is a search in the index.
  return keys_of_.tidy(num_lines / 8, [&](ShortKey key) { return is_held(key); }) || index_is_busy;
}

}  // namespace kvferry::controller
