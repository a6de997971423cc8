// What a chunk table shows of itself to be kept, and how it gets it back.
#include <algorithm>

#include "controller/index/chunk_table.h"

namespace kvferry::controller {
namespace {

constexpr std::size_t kCostOfTail = 4;  // a search, next to a step
constexpr std::uint32_t kNoSet = ~std::uint32_t{0};

}  // namespace

bool ChunkTable::walk(Walk& at, std::size_t budget, TableBlock& block) const {
  struct Known {
    std::uint32_t number = kNoSet;     // kNoSet: nobody of the set is alive
    std::vector<HolderIndex> holders;  // with tails
  };
  std::unordered_map<HolderSets::Id, Known> known;  // ids mean the same until something changes
  const auto learn = [&](HolderSets::Id set) {
    Known learnt;
    const std::size_t num_members = block.members.size();
    for (const Placement placement : index_.sets().members(set)) {
      const HolderIndex holder = placement.node();
      if (!index_.is_alive(holder)) continue;
      block.members.push_back({held_[holder].life, placement.tier()});
      if (!held_[holder].tails.empty() && (learnt.holders.empty() || learnt.holders.back() != holder))
        learnt.holders.push_back(holder);
    }
    if (block.members.size() > num_members) {
      learnt.number = static_cast<std::uint32_t>(block.set_ends.size());
      block.set_ends.push_back(static_cast<std::uint32_t>(block.members.size()));
    }
    return learnt;
  };
  block.clear();
  HolderSets::Id last = 0;
  const Known* of_last = nullptr;
  return index_.walk(at, budget, [&](const ChunkKey& key, HolderSets::Id set) -> std::size_t {
    std::size_t cost = 1;
    if (set != last || of_last == nullptr) {
      const auto [it, is_new] = known.try_emplace(set);
      if (is_new) {
        it->second = learn(set);
        cost += index_.sets().members(set).size();
      }
      last = set;
      of_last = &it->second;
    }
    if (of_last->number == kNoSet) return cost;
    if (block.runs.empty() || block.runs.back().set != of_last->number) block.runs.push_back({of_last->number, 0});
    ++block.runs.back().num_keys;
    block.keys.push_back(key);
    for (const HolderIndex holder : of_last->holders) {
      const auto tail = held_[holder].tails.find(key);
      if (tail == held_[holder].tails.end()) continue;
      const TailOf& what = tail->second;
      block.tails.push_back({key, what.group, held_[holder].life, what.num_tokens, what.age});
    }
    return cost + of_last->holders.size() * kCostOfTail;
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
