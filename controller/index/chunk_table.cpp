#include "controller/index/chunk_table.h"

#include <algorithm>
#include <utility>

namespace kvferry::controller {
namespace {

constexpr std::size_t kDeadTailsPerTail = 2;  // number of removed holders' tails that are dropped with each new tail
constexpr std::size_t kCostOfTail = 4;  // in walk(), searching for a tail costs as much as visiting this many keys
constexpr std::uint32_t kNoSet = ~std::uint32_t{0};

}  // namespace

ChunkTable::HolderIndex ChunkTable::assign_life(HolderIndex holder) {
  if (holder >= holders_.size()) holders_.resize(holder + 1);
  holders_[holder].life = ++num_lives_;
  return holder;
}

void ChunkTable::remove_holder(HolderIndex holder) {
  Holder& state = holders_[holder];
  if (!state.tails.empty()) dead_tails_.push_back({holder, state.life, std::move(state.tails)});
  state = Holder{};
  index_.remove_node(holder);
}

ChunkTable::Added ChunkTable::add(HolderIndex holder, Tier tier, std::span<const ChunkEntry> chunks, std::size_t room) {
  Added added;
  keys_.clear();
  for (const ChunkEntry& chunk : chunks) keys_.push_back(chunk.key);
  using Outcome = PlacementIndex<ChunkKey>::Outcome;
  added.num_new = index_.add(holder, tier, keys_, room, [&](std::size_t i, Outcome outcome) {
    if (outcome == Outcome::kNoRoom) {
      ++added.num_dropped;
      return;
    }
    if (outcome == Outcome::kKnown) drop_tail(holder, keys_[i]);  // the key may have been added as a tail before
    if (chunks[i].is_tail) set_tail(holder, chunks[i]);
  });
  return added;
}

std::size_t ChunkTable::remove(HolderIndex holder, std::span<const ChunkKey> keys) {
  for (const ChunkKey& key : keys) drop_tail(holder, key);
  return index_.remove(holder, keys);
}

std::vector<ChunkTable::HolderIndex> ChunkTable::holders_of(const ChunkKey& key) const {
  std::vector<HolderIndex> holders;
  for (const Placement& placement : index_.holders_of(key)) {
    // A node with the key in several tiers has several placements, one after the other.
    const bool is_known = !holders.empty() && holders.back() == placement.node();
    if (!is_known && index_.is_visible(placement.node())) holders.push_back(placement.node());
  }
  return holders;
}

std::optional<ChunkEntry> ChunkTable::find(HolderIndex holder, const ChunkKey& key) const {
  const auto placements = index_.holders_of(key);
  if (std::none_of(placements.begin(), placements.end(), [&](const Placement& p) { return p.node() == holder; }))
    return std::nullopt;
  const auto tail = holders_[holder].tails.find(key);
  if (tail == holders_[holder].tails.end()) return ChunkEntry{.key = key, .tail_group = {}};
  return ChunkEntry{key, tail->second.num_tokens, true, tail->second.group};
}

void ChunkTable::set_tail(HolderIndex holder, const ChunkEntry& chunk) {
  const bool grouped = chunk.num_tokens >= kTailGroupTokens;
  // The holder may have the tail in another tier already; the new entry counts as the newest.
  drop_tail(holder, chunk.key);
  holders_[holder].tails.emplace(
      chunk.key, TailInfo{chunk.num_tokens, grouped, grouped ? chunk.tail_group : ChunkKey{}, ++num_tails_ever_});
  if (grouped) add_to_group(holder, chunk.key, chunk.tail_group);
  drop_dead_tails(kDeadTailsPerTail);
}

void ChunkTable::drop_tail(HolderIndex holder, const ChunkKey& key) {
  Holder& state = holders_[holder];
  const auto tail = state.tails.find(key);
  if (tail == state.tails.end()) return;
  remove_from_group(holder, state.life, key, tail->second);
  state.tails.erase(tail);
}

void ChunkTable::add_to_group(HolderIndex holder, const ChunkKey& key, const ChunkKey& group) {
  std::vector<GroupedTail>& tails = groups_[group];
  // Tails of removed holders must not displace tails of existing holders.
  std::erase_if(tails, [&](const GroupedTail& tail) { return !is_alive(tail); });
  tails.push_back({holder, holders_[holder].life, key});
  const auto mine = [&](const GroupedTail& tail) { return tail.holder == holder; };
  if (std::count_if(tails.begin(), tails.end(), mine) > static_cast<std::ptrdiff_t>(kTailsPerHolderMax))
    tails.erase(std::find_if(tails.begin(), tails.end(), mine));
  if (tails.size() > tails_per_group_max_) tails.erase(tails.begin());
}

void ChunkTable::remove_from_group(HolderIndex holder, std::uint64_t life, const ChunkKey& key, const TailInfo& tail) {
  if (!tail.grouped) return;
  const auto group = groups_.find(tail.group);
  // add_to_group() may have erased this tail already. If the group's other tails were removed since, the group does not
  // exist any more.
  if (group == groups_.end()) return;
  std::erase_if(group->second, [&](const GroupedTail& other) {
    return other.holder == holder && other.life == life && other.key == key;
  });
  if (group->second.empty()) groups_.erase(group);
}

bool ChunkTable::drop_dead_tails(std::size_t num_tails) {
  for (; num_tails > 0 && !dead_tails_.empty(); --num_tails) {
    DeadHolderTails& dead = dead_tails_.back();
    if (const auto tail = dead.tails.begin(); tail != dead.tails.end()) {
      remove_from_group(dead.holder, dead.life, tail->first, tail->second);
      dead.tails.erase(tail);
    }
    if (dead.tails.empty()) dead_tails_.pop_back();
  }
  return !dead_tails_.empty();
}

bool ChunkTable::tidy(std::size_t num_steps) {
  const bool has_dead_tails = drop_dead_tails(num_steps / 4);
  return index_.tidy(num_steps) || has_dead_tails;
}

ChunkTable::Match& ChunkTable::match_of(HolderIndex holder, std::vector<Match>& matches) {
  Holder& state = holders_[holder];
  if (state.match < 0) {
    state.match = static_cast<std::int64_t>(matches.size());
    matches.push_back({.holder = holder, .tails = {}});
  }
  return matches[static_cast<std::size_t>(state.match)];
}

void ChunkTable::add_tail(HolderIndex holder, const ChunkKey& key, std::vector<Match>& matches) {
  const auto found = holders_[holder].tails.find(key);
  if (found == holders_[holder].tails.end()) return;  // the key is that of a full chunk and not of a tail
  std::vector<ChunkEntry>& tails = match_of(holder, matches).tails;
  const auto same = [&](const ChunkEntry& other) { return other.key == key; };
  if (tails.size() == kTailsPerHolderMax || std::any_of(tails.begin(), tails.end(), same)) return;
  tails.push_back({key, found->second.num_tokens, true, found->second.group});
}

void ChunkTable::lookup(const LookupView& query, std::optional<HolderIndex> asker, std::vector<Match>& matches) {
  matches.clear();
  index_.lookup(query.keys, asker, prefix_matches_);
  for (const PrefixMatch& found : prefix_matches_) {
    Match& match = match_of(found.node, matches);
    match.num_full_chunks = holders_[found.node].num_reached = found.num_keys;
    match.tier = found.tier;
  }
  for (const ChunkKey& key : query.exact_tails) {
    for (const Placement placement : index_.holders_of(key)) {
      if (placement.node() != asker && index_.is_visible(placement.node())) add_tail(placement.node(), key, matches);
    }
  }
  for (std::size_t i = query.tail_groups.size(); i-- > 0;) {
    const auto group = groups_.find(query.tail_groups[i]);
    if (group == groups_.end()) continue;
    for (auto tail = group->second.rbegin(); tail != group->second.rend(); ++tail) {
      if (is_alive(*tail) && index_.is_visible(tail->holder) && tail->holder != asker &&
          i >= holders_[tail->holder].num_reached)
        add_tail(tail->holder, tail->key, matches);
    }
  }
  for (const Match& match : matches) {
    holders_[match.holder].num_reached = 0;
    holders_[match.holder].match = -1;
  }
}

bool ChunkTable::walk(Walk& at, std::size_t budget, TableBlock& block) const {
  struct Known {
    std::uint32_t number = kNoSet;     // index of the set in the block; kNoSet: no member is alive
    std::vector<HolderIndex> holders;  // members of the set that have tails
  };
  std::unordered_map<HolderSets::Id, Known> known;  // valid while the table does not change
  const auto note_set = [&](HolderSets::Id set) {
    Known seen;
    const std::size_t num_members = block.members.size();
    for (const Placement placement : index_.sets().members(set)) {
      const HolderIndex holder = placement.node();
      if (!index_.is_alive(holder)) continue;
      block.members.push_back({holders_[holder].life, placement.tier()});
      if (!holders_[holder].tails.empty() && (seen.holders.empty() || seen.holders.back() != holder))
        seen.holders.push_back(holder);
    }
    if (block.members.size() > num_members) {
      seen.number = static_cast<std::uint32_t>(block.set_ends.size());
      block.set_ends.push_back(static_cast<std::uint32_t>(block.members.size()));
    }
    return seen;
  };
  block.clear();
  HolderSets::Id last = 0;
  const Known* last_known = nullptr;
  return index_.walk(at, budget, [&](const ChunkKey& key, HolderSets::Id set) -> std::size_t {
    std::size_t cost = 1;
    if (set != last || last_known == nullptr) {
      const auto [it, is_new] = known.try_emplace(set);
      if (is_new) {
        it->second = note_set(set);
        cost += index_.sets().members(set).size();
      }
      last = set;
      last_known = &it->second;
    }
    if (last_known->number == kNoSet) return cost;
    if (block.runs.empty() || block.runs.back().set != last_known->number)
      block.runs.push_back({last_known->number, 0});
    ++block.runs.back().num_keys;
    block.keys.push_back(key);
    for (const HolderIndex holder : last_known->holders) {
      const auto tail = holders_[holder].tails.find(key);
      if (tail == holders_[holder].tails.end()) continue;
      const TailInfo& info = tail->second;
      block.tails.push_back({key, info.group, holders_[holder].life, info.num_tokens, info.age});
    }
    return cost + last_known->holders.size() * kCostOfTail;
  });
}

void ChunkTable::restore(const TableBlock& block, const std::unordered_map<Life, HolderIndex>& holders) {
  std::vector<std::vector<Placement>> sets;
  std::size_t begin = 0;
  for (const std::uint32_t end : block.set_ends) {
    std::vector<Placement>& set = sets.emplace_back();
    for (; begin < end; ++begin) {
      const auto holder = holders.find(block.members[begin].life);
      if (holder != holders.end()) set.emplace_back(holder->second, block.members[begin].tier);
    }
    std::sort(set.begin(), set.end());
  }
  const std::span<const ChunkKey> keys = block.keys;
  std::size_t at = 0;
  for (const TableBlock::Run& run : block.runs) {
    index_.restore(keys.subspan(at, run.num_keys), sets[run.set]);
    at += run.num_keys;
  }
}

void ChunkTable::restore_tail(HolderIndex holder, const TableBlock::Tail& tail) {
  const std::span<const Placement> holders = index_.holders_of(tail.key);
  const bool is_held =
      std::any_of(holders.begin(), holders.end(), [&](Placement placement) { return placement.node() == holder; });
  if (!is_held) return;
  set_tail(holder, {tail.key, tail.num_tokens, true, tail.group});
}

}  // namespace kvferry::controller
