#include "sim_blocks.h"

#include <algorithm>

namespace kvferry::sim {

Blocks::Blocks(std::uint32_t num_blocks, std::uint32_t block_tokens, bool prefix_caching, bool uncached_first)
    : block_tokens_(block_tokens),
      prefix_caching_(prefix_caching),
      uncached_first_(uncached_first),
      blocks_(num_blocks) {
  for (std::uint32_t i = 1; i < num_blocks; ++i) free_.push_back(static_cast<BlockId>(i));
}

std::vector<BlockId> Blocks::hit(std::span<const Stamp> stamps) const {
  std::vector<BlockId> found;
  if (!prefix_caching_) return found;
  for (std::size_t end = block_tokens_; end < stamps.size(); end += block_tokens_) {
    const auto it = by_hash_.find(stamps[end - 1]);
    if (it == by_hash_.end()) break;
    found.push_back(it->second.front());
  }
  return found;
}

std::optional<std::vector<BlockId>> Blocks::take(std::span<const BlockId> hit, std::uint32_t num_new) {
  const auto idle = std::count_if(hit.begin(), hit.end(), [&](BlockId b) { return blocks_[b].users == 0; });
  if (static_cast<std::size_t>(idle) + num_new > free_.size()) return std::nullopt;
  std::vector<BlockId> table(hit.begin(), hit.end());
  for (const BlockId block : hit) {
    if (blocks_[block].users++ == 0) std::erase(free_, block);
  }
  for (std::uint32_t i = 0; i < num_new; ++i) {
    const BlockId block = free_.front();
    free_.pop_front();
    forget(block);
    blocks_[block].users = 1;
    table.push_back(block);
  }
  return table;
}

void Blocks::give_back(const std::vector<BlockId>& table) {
  std::vector<BlockId> first;
  for (auto it = table.rbegin(); it != table.rend(); ++it) {
    if (--blocks_[*it].users > 0) continue;
    if (uncached_first_ && !blocks_[*it].hash) {
      first.push_back(*it);
    } else {
      free_.push_back(*it);
    }
  }
  free_.insert(free_.begin(), first.begin(), first.end());
}

void Blocks::cache(BlockId block, Stamp last) {
  if (!prefix_caching_ || blocks_[block].hash) return;
  blocks_[block].hash = last;
  by_hash_[last].push_back(block);
}

void Blocks::forget(BlockId block) {
  if (!blocks_[block].hash) return;
  const auto it = by_hash_.find(*blocks_[block].hash);
  std::erase(it->second, block);
  if (it->second.empty()) by_hash_.erase(it);
  blocks_[block].hash.reset();
}

void Blocks::reset() {
  for (const BlockId block : free_) forget(block);
}

}  // namespace kvferry::sim
