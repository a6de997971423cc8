// Which holder has which chunks, within one namespace: the placement index, and the tails that it can't enumerate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "controller/api/client.h"
#include "controller/index/placement_index.h"
#include "controller/index/table_block.h"

namespace kvferry::controller {

/// Of tails in one (group, holder), and of tails in one match, the newest so many are kept.
constexpr std::size_t kTailsPerHolderMax = 16;

/// Pure memory, no clock. Bounds on the number of chunks are the caller's business; tails are bounded here.
/// A holder that is removed is invisible at once; its memory comes back bit by bit, with later changes and tidy().
/// Threads: one at a time.
class ChunkTable {
 public:
  using HolderIndex = NodeIndex;

  struct Match {
    HolderIndex holder = 0;
    std::uint32_t num_full_chunks = 0;
    Tier tier = Tier::kGpu;         // the slowest among the full chunks
    std::vector<ChunkEntry> tails;  // asked for by name first, then deepest group first, then newest first
  };
  struct Added {
    std::size_t num_new = 0;
    std::size_t num_dropped = 0;  // new ones for which there was no room
  };

  /// `tails_per_group_max` bounds a group over all holders; the oldest fall out and are then found by name alone.
  ChunkTable(std::size_t tails_per_group_max, IndexOptions options)
      : tails_per_group_max_(tails_per_group_max), index_(options) {}

  HolderIndex add_holder() { return begin_life(index_.add_node()); }
  /// One that no look-up sees before show_holder().
  HolderIndex add_hidden_holder() { return begin_life(index_.add_hidden_node()); }
  void show_holder(HolderIndex holder) { index_.show_node(holder); }
  void remove_holder(HolderIndex holder);

  /// Of chunks that `holder` did not have before, the first `room` are kept. A tail that is added again counts as new
  /// within its group.
  Added add(HolderIndex holder, Tier tier, std::span<const ChunkEntry> chunks, std::size_t room);
  /// From all tiers. How many `holder` had.
  std::size_t remove(HolderIndex holder, std::span<const ChunkKey> keys);

  /// Hidden and removed ones are not among them.
  std::vector<HolderIndex> holders_of(const ChunkKey& key) const;
  /// nullopt: it does not hold it.
  std::optional<ChunkEntry> find(HolderIndex holder, const ChunkKey& key) const;
  bool holds(HolderIndex holder, Tier tier, const ChunkKey& key) const { return index_.holds(holder, tier, key); }
  Life life(HolderIndex holder) const { return held_[holder].life; }
  std::size_t num_keys() const { return index_.num_keys(); }

  using Walk = PlacementIndex<ChunkKey>::Walk;
  /// Writes the next keys of living holders, hidden ones among them, up to a bound of work: `budget` keys, and where
  /// there are tails fewer. A walk under set_pinned(true) sees all that is there from its begin to its end, some of
  /// what changes meanwhile, and a key perhaps twice. False: it is at the end.
  bool walk(Walk& at, std::size_t budget, TableBlock& block) const;
  void set_pinned(bool is_pinned) { index_.set_pinned(is_pinned); }

  /// Room for so many keys at once; only while there are none.
  void reserve(std::size_t num_keys) { index_.reserve(num_keys); }
  /// What a walk saw, in a table where its holders have other lives; those that `holders` does not know are left out.
  /// Tails are the caller's business: restore_tail().
  void restore(const TableBlock& block, const std::unordered_map<Life, HolderIndex>& holders);
  /// Oldest first. Of a key that `holder` has not got: nothing happens.
  void restore_tail(HolderIndex holder, const TableBlock::Tail& tail);

  const TierDigests& digests(HolderIndex holder) const { return index_.digests(holder); }
  std::size_t num_chunks(HolderIndex holder) const { return index_.num_placements(holder); }
  std::size_t num_tails(HolderIndex holder) const { return held_[holder].tails.size(); }

  /// Every holder but `asker`, if it is one, that has keys[0] or one of the tails asked for, in no particular order.
  /// Tails of groups that lie within a holder's own full chunks are left out: the full chunk covers them. Cost: as
  /// PlacementIndex::lookup(), and linear in the tails looked at.
  void lookup(const LookupView& query, std::optional<HolderIndex> asker, std::vector<Match>& matches);

  /// Goes on with what removed holders and growth left to do: `num_steps` cache lines, and a tail for each four.
  /// False: nothing is left.
  bool tidy(std::size_t num_steps);

 private:
  struct TailOf {
    std::uint32_t num_tokens = 0;
    bool grouped = false;
    ChunkKey group;
    std::uint64_t age = 0;  // counts them all
  };
  using Tails = std::unordered_map<ChunkKey, TailOf>;
  struct Held {
    Tails tails;
    Life life = 0;                  // a holder that takes a removed one's index has another
    std::uint32_t num_reached = 0;  // of the look-up in progress: keys[0 .. num_reached) are here
    std::int64_t match = -1;        // of the look-up in progress: index of its Match
  };
  struct GroupedTail {
    HolderIndex holder;
    std::uint64_t life;
    ChunkKey key;
  };
  struct DeadHolderTails {  // of a removed holder: still in their groups, where nobody sees them
    HolderIndex holder;
    std::uint64_t life;
    Tails tails;
  };

  HolderIndex begin_life(HolderIndex holder);
  bool is_alive(const GroupedTail& tail) const { return held_[tail.holder].life == tail.life; }
  void set_tail(HolderIndex holder, const ChunkEntry& chunk);
  void drop_tail(HolderIndex holder, const ChunkKey& key);
  void enter_group(HolderIndex holder, const ChunkKey& key, const ChunkKey& group);
  void leave_group(HolderIndex holder, std::uint64_t life, const ChunkKey& key, const TailOf& tail);
  bool bury(std::size_t num_tails);
  Match& match_of(HolderIndex holder, std::vector<Match>& matches);
  void add_tail(HolderIndex holder, const ChunkKey& key, std::vector<Match>& matches);

  std::size_t tails_per_group_max_;
  PlacementIndex<ChunkKey> index_;
  std::vector<Held> held_;  // by HolderIndex
  std::uint64_t num_lives_ = 0;
  std::uint64_t num_tails_ever_ = 0;
  std::unordered_map<ChunkKey, std::vector<GroupedTail>> groups_;  // oldest first
  std::vector<DeadHolderTails> dead_tails_;
  std::vector<PrefixMatch> prefix_matches_;  // of the look-up in progress
  std::vector<ChunkKey> keys_;               // of the chunks that are being added
};

}  // namespace kvferry::controller
