// Which holder has which chunks, within one namespace: the part of the directory that look-ups run on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "controller/client.h"

namespace kvferry::controller {

/// Of tails in one (group, holder), and of tails in one match, the newest so many are kept.
constexpr std::size_t kTailsPerHolderMax = 16;

/// Pure memory, no clock. Bounds on the number of chunks are the caller's business; tails are bounded here.
/// Threads: one at a time.
class ChunkTable {
 public:
  using HolderIndex = std::uint32_t;  // dense and reused, so that a look-up can count in arrays

  struct Match {
    HolderIndex holder = 0;
    std::uint32_t num_full_chunks = 0;
    std::vector<ChunkEntry> tails;  // asked for by name first, then deepest group first, then newest first
  };

  /// `tails_per_group_max` bounds a group over all holders; the oldest fall out and are then found by name alone.
  explicit ChunkTable(std::size_t tails_per_group_max) : tails_per_group_max_(tails_per_group_max) {}

  HolderIndex add_holder();
  void remove_holder(HolderIndex holder);

  /// True when `holder` did not have the chunk before. A tail that is added again counts as new within its group.
  bool add(HolderIndex holder, const ChunkEntry& chunk);
  /// True when `holder` had it.
  bool remove(HolderIndex holder, const ChunkKey& key);
  /// Forgets all chunks of `holder`; cost is linear in what it holds.
  void clear(HolderIndex holder);

  bool holds(HolderIndex holder, const ChunkKey& key) const { return holders_[holder].chunks.contains(key); }
  std::size_t num_chunks(HolderIndex holder) const { return holders_[holder].chunks.size(); }
  std::size_t num_tails(HolderIndex holder) const { return holders_[holder].tails.size(); }

  /// Every holder but `asker` that has keys[0] or one of the tails asked for, in no particular order. Tails of groups
  /// that lie within a holder's own full chunks are left out: the full chunk covers them.
  /// Cost: linear in the holders of the keys looked at; it ends at the first key that nobody in the running has.
  std::vector<Match> lookup(const LookupQuery& query, HolderIndex asker);

 private:
  struct TailOf {
    std::uint32_t num_tokens = 0;
    bool grouped = false;
    ChunkKey group;
  };
  struct Held {
    std::unordered_set<ChunkKey> chunks;  // full ones and tails
    std::unordered_map<ChunkKey, TailOf> tails;
    std::uint32_t num_reached = 0;  // of the look-up in progress: keys[0 .. num_reached) are here
    std::int64_t match = -1;        // of the look-up in progress: index of its Match
  };
  struct GroupedTail {
    HolderIndex holder;
    ChunkKey key;
  };

  void unindex(HolderIndex holder, const ChunkKey& key);
  void enter_group(HolderIndex holder, const ChunkKey& key, const ChunkKey& group);
  void leave_group(HolderIndex holder, const ChunkKey& key, const TailOf& tail);
  Match& match_of(HolderIndex holder, std::vector<Match>& matches);
  void add_tail(HolderIndex holder, const ChunkKey& key, std::vector<Match>& matches);

  std::size_t tails_per_group_max_;
  std::vector<Held> holders_;
  std::vector<HolderIndex> free_;
  std::unordered_map<ChunkKey, std::vector<HolderIndex>> index_;
  std::unordered_map<ChunkKey, std::vector<GroupedTail>> groups_;  // oldest first
};

}  // namespace kvferry::controller
