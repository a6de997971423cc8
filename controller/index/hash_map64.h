// 64 bits to 64 bits: what an engine calls a block to what we call it.
//
// Open addressing with linear probing; a home is the high half of hash * num_slots, so homes of any two sizes have the
// same order, and a table moves into one of another size from its first slot to its last: a few runs of neighbours with
// each change, and never all at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include "controller/index/page_memory.h"

namespace kvferry::controller {

/// Values are never 0. Threads: one at a time.
class HashMap64 {
 public:
  using Keep = std::function<bool(std::uint64_t value)>;

  /// `seed` should be unknown to whoever chooses keys.
  explicit HashMap64(std::uint64_t seed);

  void prefetch(std::uint64_t key) const {
    const std::uint64_t h = hash(key);
    const Table& table = table_of(h);
    __builtin_prefetch(table.slots + home(h, table));
  }
  /// nullptr: not there. Valid until the next change; must not become 0.
  std::uint64_t* find(std::uint64_t key);
  const std::uint64_t* find(std::uint64_t key) const { return const_cast<HashMap64*>(this)->find(key); }
  /// `key` must not be there. False: its neighbourhood is full, which a hash that nobody knows makes as good as
  /// impossible; it is not kept.
  bool insert(std::uint64_t key, std::uint64_t value);
  bool erase(std::uint64_t key);

  /// Shows `keep` the values that are there now, a few with each tidy(), and erases what it doesn't want. What moves up
  /// into the place of an erased one meanwhile may be passed by.
  void begin_sweep();
  bool in_sweep() const { return in_sweep_; }
  /// Looks at about `num_slots` slots for each thing that is to be done. False: nothing is left to do.
  bool tidy(std::size_t num_slots, const Keep& keep);

  std::size_t size() const { return num_keys_; }
  std::size_t num_bytes() const { return (now_.num_slots + next_.num_slots) * sizeof(Slot); }

 private:
  struct Slot {
    std::uint64_t key, value;  // value 0: free
  };
  struct Table {
    PageMemory memory;
    Slot* slots = nullptr;
    std::uint64_t num_slots = 0;  // homes; kOverflowSlots more follow, so that no run wraps around
  };
  static constexpr std::uint64_t kSlotsMin = 1024;
  static constexpr std::uint64_t kOverflowSlots = 1024;

  __extension__ typedef unsigned __int128 Wide;
  std::uint64_t hash(std::uint64_t key) const {
    const Wide product = Wide{key ^ seed_} * 0x9e3779b97f4a7c15;
    const std::uint64_t folded = static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
    const Wide again = Wide{folded ^ seed_} * 0xd1342543de82ef95;
    return static_cast<std::uint64_t>(again) ^ static_cast<std::uint64_t>(again >> 64);
  }
  static std::uint64_t home(std::uint64_t h, const Table& table) {
    return static_cast<std::uint64_t>((Wide{h} * table.num_slots) >> 64);
  }
  const Table& table_of(std::uint64_t h) const { return is_resizing() && home(h, now_) < cursor_ ? next_ : now_; }
  Table& table_of(std::uint64_t h) { return const_cast<Table&>(std::as_const(*this).table_of(h)); }
  bool is_resizing() const { return next_.slots != nullptr; }
  static Table make_table(std::uint64_t num_slots);
  static bool put(Table& table, std::uint64_t h, Slot slot);
  void erase_slot(Table& table, Slot* slot);
  void begin_resize(std::uint64_t num_slots);
  void move_some(std::size_t num_slots);

  std::uint64_t seed_;
  Table now_;
  Table next_;                // while resizing: all keys that lay below cursor_ in now_
  std::uint64_t cursor_ = 0;  // of the resizing: the slot before it is free, so no run crosses it
  std::size_t num_keys_ = 0;
  bool in_sweep_ = false;
  std::uint64_t sweep_ = 0;
};

}  // namespace kvferry::controller
