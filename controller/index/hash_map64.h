// A map from 64-bit keys to 64-bit values: from engines' block hashes to the keys of EngineIndex.
//
// Open addressing with linear probing: a search for a key begins at its home slot and goes on until a free slot. Home
// slots have the order of the keys' hashes, however many slots a table has (home slot = high half of hash * num_slots).
// So a resize moves the keys slot by slot, a few in each call of insert() or tidy(). A lookup mostly reads one cache
// line, fewer than in KeyMap; with KeyMap, indexing vLLM's events takes a quarter more time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include "controller/index/page_memory.h"

namespace kvferry::controller {

/// The map cannot store the value 0. Threads: one at a time.
class HashMap64 {
 public:
  using Keep = std::function<bool(std::uint64_t value)>;

  /// `seed` must be unknown to clients: clients that know it could choose keys that all have the same home slot.
  explicit HashMap64(std::uint64_t seed);

  void prefetch(std::uint64_t key) const {
    const std::uint64_t h = hash(key);
    const Table& table = table_of(h);
    __builtin_prefetch(table.slots + home(h, table));
  }
  /// Returns nullptr if `key` is absent. The pointer is valid until the next change. The caller must not set the value
  /// to 0.
  std::uint64_t* find(std::uint64_t key);
  const std::uint64_t* find(std::uint64_t key) const { return const_cast<HashMap64*>(this)->find(key); }
  /// `key` must be absent. Returns false, without inserting, if no slot from the key's home slot on is free. With a
  /// secret seed this practically never happens.
  bool insert(std::uint64_t key, std::uint64_t value);
  bool erase(std::uint64_t key);

  /// Starts a sweep: tidy() passes the existing values to `keep`, a few in each call, and erases the entries whose
  /// values `keep` rejects. The sweep may skip an entry that an erasure moves to another slot.
  void begin_sweep();
  bool in_sweep() const { return in_sweep_; }
  /// Processes about `num_slots` slots of the pending resize or, if there is none, of the pending sweep. Returns false
  /// if nothing is left to do.
  bool tidy(std::size_t num_slots, const Keep& keep);

  std::size_t size() const { return num_keys_; }
  std::size_t num_bytes() const { return (now_.num_slots + next_.num_slots) * sizeof(Slot); }

 private:
  struct Slot {
    std::uint64_t key, value;  // a slot whose value is 0 is free
  };
  struct Table {
    PageMemory memory;
    Slot* slots = nullptr;
    std::uint64_t num_slots = 0;  // number of home slots; kOverflowSlots more follow, so that no run wraps around
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
  const Table& table_of(std::uint64_t h) const { return is_resizing() && home(h, now_) < resize_at_ ? next_ : now_; }
  Table& table_of(std::uint64_t h) { return const_cast<Table&>(std::as_const(*this).table_of(h)); }
  bool is_resizing() const { return next_.slots != nullptr; }
  static Table make_table(std::uint64_t num_slots);
  static bool put(Table& table, std::uint64_t h, Slot slot);
  void erase_slot(Table& table, Slot* slot);
  void begin_resize(std::uint64_t num_slots);
  void move_some(std::size_t num_slots);

  std::uint64_t seed_;
  Table now_;
  Table next_;                   // during a resize: all keys whose home in now_ lies before resize_at_
  std::uint64_t resize_at_ = 0;  // first slot not moved yet; the slot before it is free, so no run of keys crosses it
  std::size_t moved_per_insert_ = 0;  // number of slots that each insertion moves during this resize
  std::size_t num_keys_ = 0;
  bool in_sweep_ = false;
  std::uint64_t sweep_ = 0;
};

}  // namespace kvferry::controller
