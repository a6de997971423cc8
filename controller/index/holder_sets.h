// Sets of (node, tier) placements. Most chunks of a prefix lie on the same nodes, so equal sets are stored once, up to
// a limit, and a chunk only needs the number of its set.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "controller/api/tier.h"

namespace kvferry::controller {

using NodeIndex = std::uint32_t;  // counts from 0; reused after the node's removal

/// One tier of one node. Placements are ordered by node, then by tier with the fastest tier first.
struct Placement {
  std::uint32_t bits = 0;
  Placement() = default;
  Placement(NodeIndex node, Tier tier) : bits(node << 2 | static_cast<std::uint32_t>(tier)) {}
  NodeIndex node() const { return bits >> 2; }
  Tier tier() const { return static_cast<Tier>(bits & 3); }
  auto operator<=>(const Placement&) const = default;
};

/// Reference-counted sets by id. Equal sets share one id. But while at least `shared_max` shared sets exist, a set of
/// several members that is not among them is private to one reference, so that randomly placed chunks can't fill the
/// table of shared sets. Threads: one at a time. Cost: linear in the members of the set.
class HolderSets {
 public:
  using Id = std::uint32_t;  // id of a set; 0 is the empty set

  explicit HolderSets(std::size_t shared_max) : shared_max_(shared_max) {}

  /// Replaces `set` by the set with `placement` added or removed. Other references still refer to the old set. Returns
  /// false if nothing changes.
  bool add(Id& set, Placement placement);
  bool remove(Id& set, Placement placement);

  /// Returns the id of the set with `members`, which must be sorted, and counts one reference to this set.
  Id make(std::span<const Placement> members);
  /// Returns the id of a set equal to `set`, and counts one reference to it.
  Id make_again(Id set) {
    Record* record = record_of(set);
    if (record->is_shared == 0) return allocate_again(set);
    ++record->num_references;
    return set;
  }

  void release(Id set);

  /// Returns the sorted members of `set`. The span is valid until the next change.
  std::span<const Placement> members(Id set) const {
    if (set == 0) return {};
    const Record* record = record_of(set);
    return {record->members, record->num_members};
  }

  std::size_t num_shared() const { return num_shared_; }
  std::size_t num_single() const { return num_single_; }  // number of sets that are private to one reference

 private:
  static constexpr unsigned kIndexBits = 27;
  static constexpr unsigned kNumClasses = 32;
  // Log2 of the number of records in one allocation of class 0. An allocation of each next class has half as many
  // records, but at least one.
  static constexpr unsigned kBlockRecordsLog = 8;
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  struct Record {
    std::uint32_t num_references;  // in a free record: index of its class's next free record, or kNone
    std::uint32_t num_members : 31;
    std::uint32_t is_shared : 1;
    Placement members[1];  // an array of as many elements as the record's size class has room for
  };
  struct SizeClass {  // the records with room for 2^class members
    std::vector<std::unique_ptr<std::byte[]>> blocks;
    std::uint32_t num_records = 0;
    std::uint32_t first_free = kNone;
  };
  struct Change {
    Id from = 0, to = 0;  // ids before and after the change; to == 0: no change was recorded
    Placement placement;
  };
  static unsigned block_log(unsigned size_class) {
    return size_class < kBlockRecordsLog ? kBlockRecordsLog - size_class : 0;
  }
  static std::size_t record_bytes(unsigned size_class) { return 4 * (2 + (std::size_t{1} << size_class)); }
  Record* record_of(Id set) const {
    const unsigned size_class = set >> kIndexBits;
    const std::uint32_t index = set & ((1U << kIndexBits) - 1);
    const unsigned log = block_log(size_class);
    std::byte* block = classes_[size_class].blocks[index >> log].get();
    return reinterpret_cast<Record*>(block + (index & ((1U << log) - 1)) * record_bytes(size_class));
  }

  /// If `last` is the same change to the same set, sets `set` to the result of `last` and returns true.
  bool repeats(const Change& last, Id& set, Placement placement);
  Id allocate_again(Id set);
  Id allocate(std::span<const Placement> members, bool is_shared);
  std::size_t bucket_of(std::span<const Placement> members) const;
  void add_to_shared(Id set);
  void remove_from_shared(Id set);

  std::size_t shared_max_;
  SizeClass classes_[kNumClasses];
  std::vector<Id> shared_;  // hash table of the shared sets by their members; open addressing, at most half full
  std::size_t num_shared_ = 0;
  std::size_t num_single_ = 0;
  std::vector<Placement> scratch_;
  // The last changes that resulted in a shared set, for repeats(): most batches make the same change for all keys.
  Change last_add_, last_remove_;
};

}  // namespace kvferry::controller
