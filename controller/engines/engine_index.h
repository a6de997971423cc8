// Which engine holds which blocks, for engines that publish KV cache events but don't run the connector. One index
// serves one model, tenant, salt and block size.
//
// Engines choose their own block hashes; two engines may have different hashes for the same tokens. So each block gets
// a key of its own, a hash chained over its tokens and those before it; without these tokens, the key is made from the
// engine's hash. A map translates engines' hashes to these keys, because events name parents and removed blocks only by
// hash. A prompt is found by its tokens, whatever the engines' hashes are, or by the hashes of any engine.
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
  std::uint32_t block_size = 16;                             // number of tokens in a block
  std::size_t blocks_per_holder_max = std::size_t{1} << 22;  // limit for a holder; a block in two tiers counts twice
  std::size_t blocks_max = std::size_t{1} << 25;             // limit on the blocks of all holders together
  IndexOptions index = {};
};

struct EngineIndexCounters {
  std::uint64_t blocks_stored = 0;   // blocks in stored events, including blocks already known
  std::uint64_t blocks_removed = 0;  // blocks in removed events, including unknown blocks
  std::uint64_t blocks_dropped = 0;  // blocks that were not indexed because a limit on blocks was reached
  // Blocks that were stored without a block size, without tokens that fit the number of blocks, or after a parent whose
  // tokens are unknown. They can be found by hash only, unless another event has the tokens.
  std::uint64_t blocks_unplaced = 0;
  std::uint64_t other_group = 0;       // events of layer groups that are not indexed; each holder has one indexed group
  std::uint64_t other_block_size = 0;  // events with another block size than this index; their blocks are not indexed
  // Number of times that a stored hash was in use for another block, or had no room in the map of hashes.
  std::uint64_t hashes_ambiguous = 0;
};

/// The LoRA adapter and the cache salt of a prompt. Its KV depends on these besides its tokens.
struct PromptSalt {
  std::string_view lora_name;
  std::optional<std::uint64_t> lora_id;  // number of the LoRA adapter; used if lora_name is empty
  std::string_view cache_salt;
};

// Number of a holder, which is one rank of an engine. The number is reused after the holder's removal.
using HolderIndex = std::uint32_t;

/// How many blocks from the start of the prompt a holder has.
struct EngineMatch {
  HolderIndex holder = 0;
  std::uint32_t in_tier[kNumTiers] = {};     // [tier] number of leading blocks that are all in this tier
  std::uint32_t up_to_tier[kNumTiers] = {};  // [tier] number of leading blocks that are all in this tier or faster ones
};

/// The blocks that engines hold. A holder is one rank of an engine. clear() and remove_holder() take effect at once;
/// tidy() reclaims the memory in small steps. Threads: one at a time.
class EngineIndex {
 public:
  explicit EngineIndex(EngineIndexOptions options);

  /// `lora_name`: LoRA adapter assumed for events that name none; may be empty.
  HolderIndex add_holder(std::string lora_name);
  void remove_holder(HolderIndex holder);
  void clear(HolderIndex holder);

  void stored(HolderIndex holder, const BlocksStored& blocks);
  /// Queues a removal, which takes effect at the latest in the next call of stored(), clear(), tidy(), flush() or a
  /// lookup: engines report removals one block at a time, and removing many blocks at once is faster.
  void removed(HolderIndex holder, const BlocksRemoved& blocks);
  void flush();

  /// Finds every holder that has the first block, in no particular order. Tokens after the last whole block are
  /// ignored.
  void match_tokens(std::span<const std::uint32_t> tokens, const PromptSalt& salt, std::vector<EngineMatch>& matches);
  /// Same as match_tokens(), but takes the hashes of the prompt's blocks. The hashes of any engine are accepted. A hash
  /// that two holders have for different tokens finds only one of the two blocks.
  void match_hashes(std::span<const ShortKey> hashes, std::vector<EngineMatch>& matches);

  /// Does maintenance (resizing, compacting, sweeping) on about `num_lines` cache lines. Returns false if nothing is
  /// left to do.
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
    std::optional<std::uint32_t> group;  // layer group that is indexed; events of other groups are not
    bool group_is_full = false;          // whether `group` has full attention, or attention of an unknown kind
    /// Keys of this holder's blocks by hash, for hashes that keys_of_ maps to other blocks.
    std::unordered_map<ShortKey, ShortKey> own_keys;
  };

  void give_node(HolderIndex holder);
  bool counts(HolderIndex holder, const BlocksStored& blocks);
  ShortKey* key_of(Holder& holder, ShortKey hash);
  bool chain(Holder& holder, const BlocksStored& blocks);
  void bind(Holder& holder, ShortKey hash, ShortKey& key);
  void move_placements(ShortKey from, ShortKey to);
  bool is_held(ShortKey key) const;
  bool tidy_hashes(std::size_t num_slots);
  void match(std::vector<EngineMatch>& matches);
  ShortKey unplaced_key(ShortKey hash) const;

  EngineIndexOptions options_;
  PlacementIndex<ShortKey> index_;  // holders of each block, by the block's key
  HashMap64 keys_of_;  // keys of blocks by engines' hashes; a sweep erases entries of blocks with no holder
  std::vector<Holder> holders_;
  std::vector<HolderIndex> free_holders_;
  std::vector<HolderIndex> holder_of_node_;
  std::size_t num_blocks_ = 0;
  std::size_t num_left_behind_ = 0;  // estimate of the entries of keys_of_ that lost their holders since the last sweep
  EngineIndexCounters counters_;

  std::vector<ShortKey> chain_;           // buffer for the keys of the current blocks
  std::vector<ShortKey> removed_hashes_;  // hashes passed to removed() since the last flush()
  HolderIndex removed_holder_ = 0;
  Tier removed_tier_ = Tier::kGpu;
  struct Walker {  // A holder that has all blocks of the prompt that match() has visited.
    NodeIndex node;
    // Bit masks of tiers. `alone`: tiers that have all visited blocks by themselves; `together`: tiers that have all
    // visited blocks together with faster tiers.
    std::uint8_t alone, together;
    std::uint32_t match;  // index in match()'s `matches`
  };
  std::vector<Walker> walkers_;
};

}  // namespace kvferry::controller
