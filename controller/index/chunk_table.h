// Which holder has which chunks in one namespace: the placement index, plus the details of tails (partial chunks).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "controller/api/client.h"
#include "controller/index/placement_index.h"

namespace kvferry::controller {

/// Identifies a holder of a table. A Life is never reused, but a HolderIndex is reused after its holder was removed.
using Life = std::uint64_t;

/// A part of a saved table: keys in the order of the table, grouped into runs of keys with equal holders. If a block is
/// lost, the other blocks stay usable.
struct TableBlock {
  struct Member {
    Life life = 0;
    Tier tier = Tier::kGpu;
  };
  struct Run {
    std::uint32_t set = 0;  // index in set_ends of the set of the keys' holders
    std::uint32_t num_keys = 0;
  };
  struct Tail {
    ChunkKey key;
    ChunkKey group;  // key of the tail's group; all zeros: the tail has no group
    Life life = 0;
    std::uint32_t num_tokens = 0;
    std::uint64_t age = 0;  // number of the tail in the order of insertion into the table
  };
  std::vector<ChunkKey> keys;
  std::vector<Run> runs;  // runs of keys with equal holders; together they cover all keys
  std::vector<Member> members;
  std::vector<std::uint32_t> set_ends;  // set i is members [set_ends[i - 1], set_ends[i]); set 0 begins at 0
  std::vector<Tail> tails;              // details of those keys that are tails

  void clear() {
    keys.clear();
    runs.clear();
    members.clear();
    set_ends.clear();
    tails.clear();
  }
};

/// Limit on the tails of one holder in one group, beyond which the oldest are dropped from the group, and limit on the
/// tails of a Match.
constexpr std::size_t kTailsPerHolderMax = 16;

/// The chunks of all holders in one namespace. Pure, without a clock. The caller bounds the number of chunks; this
/// class bounds the number of tails in a group. A removed holder is invisible at once; later changes and tidy() reclaim
/// its memory in small steps. Threads: one at a time.
class ChunkTable {
 public:
  using HolderIndex = NodeIndex;

  struct Match {
    HolderIndex holder = 0;
    std::uint32_t num_full_chunks = 0;
    Tier tier = Tier::kGpu;  // slowest tier among the full chunks, each counted in its fastest tier
    // Tails: first those in the lookup's exact_tails, then those of its tail_groups, from the last group to the first,
    // the newest tail of a group first.
    std::vector<ChunkEntry> tails;
  };
  struct Added {
    std::size_t num_new = 0;
    std::size_t num_dropped = 0;  // number of new chunks that were not added for lack of room
  };

  /// `tails_per_group_max`: limit on a group's tails over all holders; above it, the oldest tails are dropped from the
  /// group, and a lookup finds them only by its exact_tails.
  ChunkTable(std::size_t tails_per_group_max, IndexOptions options)
      : tails_per_group_max_(tails_per_group_max), index_(options) {}

  HolderIndex add_holder() { return assign_life(index_.add_node()); }
  /// Adds a holder that lookups skip until show_holder() is called.
  HolderIndex add_hidden_holder() { return assign_life(index_.add_hidden_node()); }
  void show_holder(HolderIndex holder) { index_.show_node(holder); }
  void remove_holder(HolderIndex holder);

  /// Adds chunks that `holder` does not have yet in `tier`, at most the first `room` of them. A tail that is added
  /// again becomes the newest tail of its group.
  Added add(HolderIndex holder, Tier tier, std::span<const ChunkEntry> chunks, std::size_t room);
  /// Removes the keys from all tiers; returns the number of (key, tier) pairs that `holder` had.
  std::size_t remove(HolderIndex holder, std::span<const ChunkKey> keys);

  /// Returns the visible holders of `key`.
  std::vector<HolderIndex> holders_of(const ChunkKey& key) const;
  /// Returns nullopt if `holder` does not have `key`.
  std::optional<ChunkEntry> find(HolderIndex holder, const ChunkKey& key) const;
  bool holds(HolderIndex holder, Tier tier, const ChunkKey& key) const { return index_.holds(holder, tier, key); }
  Life life(HolderIndex holder) const { return holders_[holder].life; }
  std::size_t num_keys() const { return index_.num_keys(); }

  using Walk = PlacementIndex<ChunkKey>::Walk;
  /// Writes the next keys of live holders, including hidden ones, to `block`, at most `budget` keys. With
  /// set_pinned(true), a walk sees every key that exists during the whole walk, and may see a key twice or miss a
  /// change made meanwhile. Returns false at the end of the table.
  bool walk(Walk& at, std::size_t budget, TableBlock& block) const;
  void set_pinned(bool is_pinned) { index_.set_pinned(is_pinned); }

  /// Makes room for `num_keys` keys. The table must be empty.
  void reserve(std::size_t num_keys) { index_.reserve(num_keys); }
  /// Adds the keys of a block. `holders`: [Life in the block] holder of this table; a Life that is not in this map is
  /// skipped. The caller passes the block's tails to restore_tail().
  void restore(const TableBlock& block, const std::unordered_map<Life, HolderIndex>& holders);
  /// Adds the details of a tail. The caller must pass the oldest tail first. Ignores a key that `holder` does not have.
  void restore_tail(HolderIndex holder, const TableBlock::Tail& tail);

  const TierDigests& digests(HolderIndex holder) const { return index_.digests(holder); }
  std::size_t num_chunks(HolderIndex holder) const { return index_.num_placements(holder); }
  std::size_t num_tails(HolderIndex holder) const { return holders_[holder].tails.size(); }

  /// Finds every visible holder except `asker` that has keys[0] or one of the requested tails, in no particular order.
  /// Skips tails of tail_groups[i] if the holder has keys[0] to keys[i], because these match more tokens. Cost: that of
  /// PlacementIndex::lookup(), plus time linear in the number of visited tails.
  void lookup(const LookupView& query, std::optional<HolderIndex> asker, std::vector<Match>& matches);

  /// Processes about `num_steps` cache lines for each pending task of the index (see KeyMap::tidy()), and drops up to a
  /// quarter as many tails of removed holders. Returns false if nothing is left to do.
  bool tidy(std::size_t num_steps);

 private:
  struct TailInfo {
    std::uint32_t num_tokens = 0;
    bool grouped = false;
    ChunkKey group;
    std::uint64_t age = 0;  // number of the tail in the order of insertion into the table
  };
  using Tails = std::unordered_map<ChunkKey, TailInfo>;
  struct Holder {
    Tails tails;
    Life life = 0;                  // each holder that reuses this HolderIndex gets a new Life
    std::uint32_t num_reached = 0;  // during lookup(): the holder has keys[0 .. num_reached)
    std::int64_t match = -1;        // during lookup(): index of the holder's Match, or -1 if it has none
  };
  struct GroupedTail {
    HolderIndex holder;
    std::uint64_t life;
    ChunkKey key;
  };
  struct DeadHolderTails {  // A removed holder whose tails still take up room in their groups.
    HolderIndex holder;
    std::uint64_t life;
    Tails tails;
  };

  HolderIndex assign_life(HolderIndex holder);
  bool is_alive(const GroupedTail& tail) const { return holders_[tail.holder].life == tail.life; }
  void set_tail(HolderIndex holder, const ChunkEntry& chunk);
  void drop_tail(HolderIndex holder, const ChunkKey& key);
  void add_to_group(HolderIndex holder, const ChunkKey& key, const ChunkKey& group);
  void remove_from_group(HolderIndex holder, std::uint64_t life, const ChunkKey& key, const TailInfo& tail);
  bool drop_dead_tails(std::size_t num_tails);
  Match& match_of(HolderIndex holder, std::vector<Match>& matches);
  void add_tail(HolderIndex holder, const ChunkKey& key, std::vector<Match>& matches);

  std::size_t tails_per_group_max_;
  PlacementIndex<ChunkKey> index_;
  std::vector<Holder> holders_;  // [HolderIndex] state of the holder
  std::uint64_t num_lives_ = 0;
  std::uint64_t num_tails_ever_ = 0;
  std::unordered_map<ChunkKey, std::vector<GroupedTail>> groups_;  // [group] the group's tails, oldest first
  std::vector<DeadHolderTails> dead_tails_;
  std::vector<PrefixMatch> prefix_matches_;  // buffer that lookup() reuses
  std::vector<ChunkKey> keys_;               // buffer that add() reuses
};

}  // namespace kvferry::controller
