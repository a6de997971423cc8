// The engine's paged KV blocks as vLLM's v1 block pool keeps them: freed blocks keep their content and stay a prefix
// hit until they are handed out again.
#pragma once

#include <deque>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "sim_text.h"
#include "transport/base/ids.h"

namespace kvferry::sim {

class Blocks {
 public:
  /// Ids 1 .. num_blocks - 1 are usable; 0 is the null block. uncached_first: blocks without a hash are reused before
  /// all others, last freed first (vLLM 0.32); otherwise strictly in the order in which they were freed.
  Blocks(std::uint32_t num_blocks, std::uint32_t block_tokens, bool prefix_caching, bool uncached_first);

  /// Full cached blocks of the prefix, leaving at least one token to compute. stamps: of all the request's tokens.
  std::vector<BlockId> hit(std::span<const Stamp> stamps) const;
  /// The hit's blocks and then `num_new` fresh ones; nullopt, and nothing changed, when there is no room.
  std::optional<std::vector<BlockId>> take(std::span<const BlockId> hit, std::uint32_t num_new);
  /// Gives back a request's table, its last block first.
  void give_back(const std::vector<BlockId>& table);
  /// From now on the block is found by the stamp of its last token.
  void cache(BlockId block, Stamp last);
  /// The block's content is wrong: no prefix hit may find it.
  void forget(BlockId block);
  /// Forgets every cached block that nobody uses.
  void reset();

  std::uint32_t num_free() const { return static_cast<std::uint32_t>(free_.size()); }
  std::uint32_t block_tokens() const { return block_tokens_; }

 private:
  struct Block {
    std::uint32_t users = 0;
    std::optional<Stamp> hash;
  };
  std::uint32_t block_tokens_;
  bool prefix_caching_;
  bool uncached_first_;
  std::vector<Block> blocks_;
  std::deque<BlockId> free_;
  std::unordered_map<Stamp, std::vector<BlockId>> by_hash_;
};

}  // namespace kvferry::sim
