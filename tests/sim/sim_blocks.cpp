#include "sim_blocks.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace kvferry::sim {

std::uint32_t alignment_of(const std::vector<KvGroup>& groups) {
  std::uint32_t alignment = 1;
  for (const KvGroup& group : groups) alignment = std::lcm(alignment, group.block_tokens);
  return alignment;
}

Blocks::Blocks(std::uint32_t num_blocks, bool prefix_caching, bool uncached_first, std::vector<KvGroup> groups)
    : prefix_caching_(prefix_caching),
      uncached_first_(uncached_first),
      groups_(std::move(groups)),
      alignment_(alignment_of(groups_)),
      blocks_(num_blocks) {
  for (std::uint32_t i = 1; i < num_blocks; ++i) free_.push_back(static_cast<BlockId>(i));
}

const std::vector<BlockId>* Blocks::cached(std::size_t group, Stamp last) const {
  const auto found = by_hash_.find(name(group, last));
  return found == by_hash_.end() || new_states_.contains(found->first) ? nullptr : &found->second;
}

/// Returns the first block to which a token after the first `computed` tokens attends.
std::uint32_t Blocks::first_needed(std::size_t group, std::uint32_t computed) const {
  return first_attended(groups_[group], computed) / groups_[group].block_tokens;
}

BlockTable Blocks::hit(std::span<const Stamp> stamps) const {
  BlockTable found(groups_.size());
  if (!prefix_caching_ || stamps.empty()) return found;
  const auto block_of = [&](std::size_t group, std::uint32_t block) {
    return cached(group, stamps[(block + 1) * groups_[group].block_tokens - 1]);
  };
  auto end = static_cast<std::uint32_t>(stamps.size() - 1);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (groups_[g].window != 0) continue;
    std::uint32_t have = 0;
    while ((have + 1) * groups_[g].block_tokens <= end && block_of(g, have) != nullptr) ++have;
    end = have * groups_[g].block_tokens;
  }
  end -= end % alignment_;
  const auto window_is_there = [&] {
    for (std::size_t g = 0; g < groups_.size(); ++g)
      for (std::uint32_t b = first_needed(g, end); groups_[g].window != 0 && b < end / groups_[g].block_tokens; ++b)
        if (block_of(g, b) == nullptr) return false;
    return true;
  };
  while (end > 0 && !window_is_there()) end -= alignment_;
  for (std::size_t g = 0; g < groups_.size(); ++g)
    for (std::uint32_t b = 0; b < end / groups_[g].block_tokens; ++b)
      found[g].push_back(b < first_needed(g, end) ? kNullBlock : block_of(g, b)->front());
  return found;
}

bool Blocks::has_room(const BlockTable& table, const BlockTable& hit, std::uint32_t num_tokens,
                      std::uint32_t computed) const {
  std::size_t wanted = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (const BlockId block : hit[g]) wanted += block != kNullBlock && blocks_[block].users == 0;
    const auto have = static_cast<std::uint32_t>(table[g].size() + hit[g].size());
    const std::uint32_t first = std::max(have, first_needed(g, computed)),
                        num_blocks = blocks_for(groups_[g], num_tokens);
    wanted += num_blocks > first ? num_blocks - first : 0;
  }
  return wanted <= free_.size();
}

bool Blocks::take(BlockTable& table, const BlockTable& hit, std::uint32_t num_tokens, std::uint32_t computed) {
  if (!has_room(table, hit, num_tokens, computed)) return false;
  for (const std::vector<BlockId>& group : hit)
    for (const BlockId block : group)
      if (block != kNullBlock && blocks_[block].users++ == 0) std::erase(free_, block);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    table[g].insert(table[g].end(), hit[g].begin(), hit[g].end());
    while (table[g].size() < blocks_for(groups_[g], num_tokens)) {
      if (table[g].size() < first_needed(g, computed)) {
        table[g].push_back(kNullBlock);
        continue;
      }
      const BlockId block = free_.front();
      free_.pop_front();
      drop(block);
      blocks_[block].users = 1;
      table[g].push_back(block);
    }
  }
  return true;
}

void Blocks::drop_skipped(BlockTable& table, std::uint32_t computed) {
  BlockTable skipped(table.size());
  for (std::size_t g = 0; g < table.size(); ++g) {
    const std::size_t end = std::min<std::size_t>(first_needed(g, computed), table[g].size());
    for (std::size_t b = 0; b < end; ++b)
      if (table[g][b] != kNullBlock) skipped[g].push_back(std::exchange(table[g][b], kNullBlock));
  }
  give_back(skipped);
}

void Blocks::give_back(const BlockTable& table) {
  std::vector<BlockId> first;
  for (const std::vector<BlockId>& group : table) {
    for (auto it = group.rbegin(); it != group.rend(); ++it) {
      if (*it == kNullBlock || --blocks_[*it].users > 0) continue;
      if (uncached_first_ && !blocks_[*it].hash) {
        first.push_back(*it);
      } else {
        free_.push_back(*it);
      }
    }
  }
  free_.insert(free_.begin(), first.begin(), first.end());
}

void Blocks::cache(std::size_t group, BlockId block, Stamp last) {
  if (!prefix_caching_ || block == kNullBlock || blocks_[block].hash) return;
  if (groups_[group].window == kState && !by_hash_.contains(name(group, last))) new_states_.insert(name(group, last));
  blocks_[block].hash = name(group, last);
  by_hash_[name(group, last)].push_back(block);
}

void Blocks::drop(BlockId block) {
  if (!blocks_[block].hash) return;
  const auto it = by_hash_.find(*blocks_[block].hash);
  std::erase(it->second, block);
  if (it->second.empty()) by_hash_.erase(it);
  blocks_[block].hash.reset();
}

void Blocks::reset() {
  for (const BlockId block : free_) drop(block);
}

}  // namespace kvferry::sim
