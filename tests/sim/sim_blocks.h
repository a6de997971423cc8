// The engine's paged KV blocks as vLLM's v1 block pool keeps them: freed blocks keep their content and stay a prefix
// hit until they are handed out again. Several KV groups share the ids; one with a window gives up what lies before it.
#pragma once

#include <deque>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "connector/core/scheduler/request_state.h"
#include "sim_text.h"
#include "transport/base/ids.h"

namespace kvferry::sim {

constexpr std::uint32_t kState = UINT32_MAX;

/// The end of a block at which a step from `start` leaves a state before its own end; 0: nowhere. alignment: see
/// CoreConfig::checkpoint_alignment.
constexpr std::uint32_t checkpoint_in(std::uint32_t start, std::uint32_t end, std::uint32_t block_tokens,
                                      std::uint32_t alignment) {
  if (alignment == 0 || end <= start || start % block_tokens != 0) return 0;
  const std::uint32_t at = (end - 1) / block_tokens * block_tokens;
  return at > start && (at - start) % alignment == 0 ? at : 0;
}

class Blocks {
 public:
  /// Ids 1 .. num_blocks - 1 are usable; 0 is the null block. uncached_first: blocks without a hash are reused before
  /// all others, last freed first (vLLM 0.32); otherwise strictly in the order in which they were freed.
  /// windows: of each KV group, in tokens; 0: attends to everything; kState: a block has the state after its last
  /// token.
  Blocks(std::uint32_t num_blocks, std::uint32_t block_tokens, bool prefix_caching, bool uncached_first,
         std::vector<std::uint32_t> windows = {0});

  /// Full cached blocks of the longest prefix that every group can serve, leaving at least one token to compute; null
  /// blocks where a window has passed. stamps: of all the request's tokens.
  BlockTable hit(std::span<const Stamp> stamps) const;
  /// Appends to `table` the hit's blocks, then fresh ones until each group has num_blocks, null where a window has
  /// passed when `computed` tokens are there. False, and nothing changed, when there is no room.
  bool take(BlockTable& table, const BlockTable& hit, std::uint32_t num_blocks, std::uint32_t computed);
  /// Whether take() would find room for so many blocks.
  bool has_room(const BlockTable& table, const BlockTable& hit, std::uint32_t num_blocks, std::uint32_t computed) const;
  /// Gives up the blocks that no token after the first `computed` attends to.
  void drop_skipped(BlockTable& table, std::uint32_t computed);
  /// Gives back a request's table, its last block first.
  void give_back(const BlockTable& table);
  /// From now on the block is found by the stamp of its last token.
  void cache(std::size_t group, BlockId block, Stamp last);
  /// States that are registered from now on are not found until the next call, since they are read before all writes.
  void start_step() { new_states_.clear(); }
  /// The block's content is wrong: no prefix hit may find it.
  void drop(BlockId block);
  /// Drops every cached block that nobody uses.
  void reset();

  std::uint32_t num_free() const { return static_cast<std::uint32_t>(free_.size()); }
  std::uint32_t num_usable() const { return static_cast<std::uint32_t>(blocks_.size()) - 1; }
  std::uint32_t block_tokens() const { return block_tokens_; }
  const std::vector<std::uint32_t>& windows() const { return windows_; }

 private:
  struct Block {
    std::uint32_t users = 0;
    std::optional<Stamp> hash;
  };
  static Stamp name(std::size_t group, Stamp last) { return last + group * 0x9e3779b97f4a7c15ULL; }
  const std::vector<BlockId>* cached(std::size_t group, Stamp last) const;
  std::uint32_t first_needed(std::size_t group, std::uint32_t computed) const;

  std::uint32_t block_tokens_;
  bool prefix_caching_;
  bool uncached_first_;
  std::vector<std::uint32_t> windows_;
  std::vector<Block> blocks_;
  std::deque<BlockId> free_;
  std::unordered_map<Stamp, std::vector<BlockId>> by_hash_;
  std::set<Stamp> new_states_;  // names
};

}  // namespace kvferry::sim
