// Which engine holds which blocks, for engines that tell of their cache but don't run the connector: one model, one
// tenant, one block size.
//
// Engines name blocks as they like; two of them may name the same tokens differently. So blocks have keys of our own, a
// chain of hashes over their tokens, and a map tells which key an engine's hash stands for: its removals and parents
// are named by hash alone. A prompt is found by its tokens whatever its engines call it, and by anybody's hashes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "controller/engines/engine_events.h"
#include "controller/index/hash_map64.h"
#include "controller/index/placement_index.h"

namespace kvferry::controller {

struct EngineIndexOptions {
  std::uint32_t block_size = 16;
  std::size_t blocks_per_holder_max = std::size_t{1} << 22;  // a block in two tiers counts twice
  std::size_t blocks_max = std::size_t{1} << 25;             // over all holders
  IndexOptions index = {};
};

struct EngineIndexCounters {
  std::uint64_t blocks_stored = 0;     // told, also those already known
  std::uint64_t blocks_removed = 0;    // likewise
  std::uint64_t blocks_dropped = 0;    // beyond a bound on memory
  std::uint64_t blocks_unplaced = 0;   // no tokens, or a parent that nobody told of: found by hash alone
  std::uint64_t other_group = 0;       // events of groups that don't decide what a prefix is worth
  std::uint64_t other_block_size = 0;  // events of blocks that are shorter or longer than the namespace's
  std::uint64_t hashes_ambiguous = 0;  // one engine's hash stands for other tokens than another's
};

/// What changes KV besides tokens.
struct PromptSalt {
  std::string_view lora_name;
  std::optional<std::uint64_t> lora_id;  // where there is no name
  std::string_view cache_salt;
};

using HolderIndex = std::uint32_t;  // dense and reused

/// In blocks from the prompt's first one.
struct EngineMatch {
  HolderIndex holder = 0;
  std::uint32_t in_tier[kNumTiers] = {};     // all of them in this one tier
  std::uint32_t up_to_tier[kNumTiers] = {};  // each in this tier or a faster one; the last: anywhere
};

/// Threads: one at a time. Holders are ranks of engines. A holder that is cleared or removed is empty at once; memory
/// comes back bit by bit with tidy().
class EngineIndex {
 public:
  explicit EngineIndex(EngineIndexOptions options);

  /// `lora_name`: of events that name no adapter; may be empty.
  HolderIndex add_holder(std::string lora_name);
  void remove_holder(HolderIndex holder);
  void clear(HolderIndex holder);

  void stored(HolderIndex holder, const BlocksStored& blocks);
  /// Takes effect with the next change, look-up or flush(): engines tell of one block at a time, and searching for many
  /// together is faster.
  void removed(HolderIndex holder, const BlocksRemoved& blocks);
  void flush();

  /// Of every holder that has the first block, in no particular order. Tokens beyond the last whole block don't count.
  void match_tokens(std::span<const std::uint32_t> tokens, const PromptSalt& salt, std::vector<EngineMatch>& matches);
  /// By engines' hashes of the blocks from the first one on; anybody's.
  void match_hashes(std::span<const ShortKey> hashes, std::vector<EngineMatch>& matches);

  /// Looks at about `num_lines` cache lines. False: nothing is left to do.
  bool tidy(std::size_t num_lines);

  std::uint32_t block_size() const { return options_.block_size; }
  std::size_t num_blocks(HolderIndex holder, Tier tier) const {
    return index_.digests(holders_[holder].node)[static_cast<std::size_t>(tier)].num_keys;
  }
  std::size_t num_blocks() const { return num_blocks_; }
  std::size_t num_hashes() const { return keys_of_.size(); }
  const EngineIndexCounters& counters() const { return counters_; }

 private:
  struct Holder {
    NodeIndex node = 0;
    bool is_used = false;
    std::string lora_name;
    std::optional<std::uint32_t> group;  // whose blocks count
    bool group_is_full = false;
    /// Hashes that stand for other tokens here than with others.
    std::unordered_map<ShortKey, ShortKey> own_keys;
  };

  bool counts(HolderIndex holder, const BlocksStored& blocks);
  ShortKey* key_of(Holder& holder, ShortKey hash);
  bool chain(Holder& holder, const BlocksStored& blocks);
  void bind(Holder& holder, ShortKey hash, ShortKey& key);
  void move_placements(ShortKey from, ShortKey to);
  bool is_held(ShortKey key) const;
  void match(std::vector<EngineMatch>& matches);
  ShortKey unplaced_key(ShortKey hash) const;
  ShortKey root_of(std::string_view lora_name, std::optional<std::uint64_t> lora_id) const;

  EngineIndexOptions options_;
  PlacementIndex<ShortKey> index_;  // by our keys
  HashMap64 keys_of_;               // engines' hashes to our keys; those of blocks that nobody holds go by and by
  std::vector<Holder> holders_;
  std::vector<HolderIndex> free_holders_;
  std::vector<HolderIndex> holder_of_node_;
  std::size_t num_blocks_ = 0;
  std::size_t num_left_behind_ = 0;  // hashes of keys that may be held by nobody
  EngineIndexCounters counters_;

  std::vector<ShortKey> chain_;        // scratch: keys of the blocks at hand
  std::vector<ShortKey> gone_hashes_;  // of removed(), until flush()
  HolderIndex gone_holder_ = 0;
  Tier gone_tier_ = Tier::kGpu;
  struct Walker {
    NodeIndex node;
    std::uint8_t alone, together;  // bits of tiers that all blocks so far lie in, or up to
    std::uint32_t match;           // place in the matches
  };
  std::vector<Walker> walkers_;
};

}  // namespace kvferry::controller
