// The engine's paged KV blocks as vLLM's v1 block pool keeps them: freed blocks keep their content and stay a prefix
// hit until they are handed out again. Several KV groups share the ids; one with a window gives up what lies before it.
#pragma once

#include <deque>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "connector/core/scheduler/request_state.h"
#include "sim_text.h"
#include "transport/base/ids.h"

namespace kvferry::sim {

class Blocks {
 public:
  /// Ids 1 .. num_blocks - 1 are usable; 0 is the null block. uncached_first: blocks without a hash are reused before
  /// all others, last freed first (vLLM 0.32); otherwise strictly in the order in which they were freed.
  /// windows: of each KV group, in tokens; 0: attends to everything.
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
  /// The block's content is wrong: no prefix hit may find it.
  void forget(BlockId block);
  /// Forgets every cached block that nobody uses.
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
};

}  // namespace kvferry::sim
