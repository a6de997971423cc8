// Writing a chunk table to blocks for a snapshot, and restoring it from them.
#include <algorithm>

#include "controller/index/chunk_table.h"

namespace kvferry::controller {
namespace {

constexpr std::size_t kCostOfTail = 4;  // cost of a search relative to a step
constexpr std::uint32_t kNoSet = ~std::uint32_t{0};

}  // namespace

bool ChunkTable::walk(Walk& at, std::size_t budget, TableBlock& block) const {
  struct Known {
    std::uint32_t number = kNoSet;     // kNoSet: no member of the set is alive
    std::vector<HolderIndex> holders;  // members that have tails
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
