// The engine's paged KV blocks, as vLLM's v1 block pool keeps them. A freed block keeps its content, and is a prefix
// hit until it is used again. Several KV groups share the block ids. A group with a window frees the blocks that lie
// before its window.
#pragma once

#include <deque>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "connector/core/core_config.h"
#include "connector/core/scheduler/request_state.h"
#include "sim_text.h"
#include "transport/base/ids.h"

namespace kvferry::sim {

/// KvGroup::window of a group whose blocks have the state after their last token.
constexpr std::uint32_t kState = UINT32_MAX;

/// Returns the first token to which the token at `position` attends, or which holds the state that the token needs.
constexpr std::uint32_t first_attended(const KvGroup& group, std::uint32_t position) {
  if (group.window == kState) return position == 0 ? 0 : position - 1;
  if (group.window == 0) return 0;
  if (group.window_restarts) return position / group.window * group.window;
  return position < group.window ? 0 : position + 1 - group.window;
}

constexpr std::uint32_t blocks_for(const KvGroup& group, std::uint32_t num_tokens) {
  return (num_tokens + group.block_tokens - 1) / group.block_tokens;
}

/// Returns the least common multiple of the block sizes: the engine's own hits end at its multiples.
std::uint32_t alignment_of(const std::vector<KvGroup>& groups);

/// Returns the end of a block at which a step that begins at `start` leaves a state before the step's own end; 0 if
/// there is none. alignment: see CoreConfig::checkpoint_alignment.
constexpr std::uint32_t checkpoint_in(std::uint32_t start, std::uint32_t end, std::uint32_t block_tokens,
                                      std::uint32_t alignment) {
  if (alignment == 0 || end <= start || start % block_tokens != 0) return 0;
  const std::uint32_t at = (end - 1) / block_tokens * block_tokens;
  return at > start && (at - start) % alignment == 0 ? at : 0;
}

class Blocks {
 public:
  /// Blocks 1 .. num_blocks - 1 can be used; block 0 is the null block.
  ///
  /// uncached_first: blocks without a hash are reused before all others, the last freed block first (vLLM 0.32);
  /// otherwise blocks are reused in the order in which they were freed.
  Blocks(std::uint32_t num_blocks, bool prefix_caching, bool uncached_first, std::vector<KvGroup> groups);

  /// Returns the full cached blocks of the longest prefix that every group has, so that at least one token is left to
  /// compute. Blocks before a window are null blocks. stamps: of all the request's tokens.
  BlockTable hit(std::span<const Stamp> stamps) const;
  /// Appends the hit's blocks to `table`, then free blocks until each group has `num_tokens`. Blocks that lie before a
  /// window when `computed` tokens are computed are null blocks. If there is no room, changes nothing and returns
  /// false.
  bool take(BlockTable& table, const BlockTable& hit, std::uint32_t num_tokens, std::uint32_t computed);
  /// Returns whether take() would find enough free blocks.
  bool has_room(const BlockTable& table, const BlockTable& hit, std::uint32_t num_tokens, std::uint32_t computed) const;
  /// Frees the blocks to which no token after the first `computed` tokens attends.
  void drop_skipped(BlockTable& table, std::uint32_t computed);
  /// Frees all blocks of a request's table, the last block first.
  void give_back(const BlockTable& table);
  /// Registers a block, so that it is found by the stamp of its last token.
  void cache(std::size_t group, BlockId block, Stamp last);
  /// Begins a step. States that are registered in this step are not found until the next one, because a step reads all
  /// states before it writes any.
  void start_step() { new_states_.clear(); }
  /// Removes a block with wrong content from the prefix cache.
  void drop(BlockId block);
  /// Removes all blocks that no request uses from the prefix cache.
  void reset();

  std::uint32_t num_free() const { return static_cast<std::uint32_t>(free_.size()); }
  std::uint32_t num_usable() const { return static_cast<std::uint32_t>(blocks_.size()) - 1; }
  const std::vector<KvGroup>& groups() const { return groups_; }

 private:
  struct Block {
    std::uint32_t users = 0;
    std::optional<Stamp> hash;
  };
  static Stamp name(std::size_t group, Stamp last) { return last + group * 0x9e3779b97f4a7c15ULL; }
  const std::vector<BlockId>* cached(std::size_t group, Stamp last) const;
  std::uint32_t first_needed(std::size_t group, std::uint32_t computed) const;

  bool prefix_caching_;
  bool uncached_first_;
  std::vector<KvGroup> groups_;
  std::uint32_t alignment_;
  std::vector<Block> blocks_;
  std::deque<BlockId> free_;
  std::unordered_map<Stamp, std::vector<BlockId>> by_hash_;
  std::set<Stamp> new_states_;  // names
};

}  // namespace kvferry::sim
