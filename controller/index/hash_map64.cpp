#include "controller/index/hash_map64.h"

#include <algorithm>
#include <utility>

namespace kvferry::controller {
namespace {

// Least number of slots that each insertion moves during a resize.
constexpr std::size_t kSlotsMovedMin = 16;
// A table shrinks to at least this part of its size at once, so that an insertion meanwhile moves few slots.
constexpr std::uint64_t kShrinkMax = 64;

bool is_full(std::size_t num_keys, std::uint64_t num_slots) { return num_keys > num_slots / 4 * 3; }

}  // namespace

HashMap64::HashMap64(std::uint64_t seed) : seed_(seed), now_(make_table(kSlotsMin)) {}

HashMap64::Table HashMap64::make_table(std::uint64_t num_slots) {
  Table table;
  table.memory = PageMemory((num_slots + kOverflowSlots) * sizeof(Slot));
  table.slots = static_cast<Slot*>(table.memory.data());
  table.num_slots = num_slots;
  return table;
}

std::uint64_t* HashMap64::find(std::uint64_t key) {
  const std::uint64_t h = hash(key);
  Table& table = table_of(h);
  for (Slot* slot = table.slots + home(h, table); slot->value != 0; ++slot) {
    if (slot->key == key) return &slot->value;
  }
  return nullptr;
}

bool HashMap64::put(Table& table, std::uint64_t h, Slot entry) {
  // The last slot stays free, so that every run of keys ends.
  const Slot* last = table.slots + table.num_slots + kOverflowSlots - 1;
  for (Slot* slot = table.slots + home(h, table); slot != last; ++slot) {
    if (slot->value != 0) continue;
    *slot = entry;
    return true;
  }
  return false;
}

bool HashMap64::insert(std::uint64_t key, std::uint64_t value) {
  if (is_resizing()) {
    move_some(moved_per_insert_);
  } else if (is_full(num_keys_ + 1, now_.num_slots)) {
    begin_resize(now_.num_slots / 2 * 3);
  }
  const std::uint64_t h = hash(key);
  if (!put(table_of(h), h, {key, value})) return false;
  ++num_keys_;
  return true;
}

bool HashMap64::erase(std::uint64_t key) {
  std::uint64_t* value = find(key);
  if (value == nullptr) return false;
  erase_slot(table_of(hash(key)), reinterpret_cast<Slot*>(value - 1));
  return true;
}

/// Fills the hole with following keys (backward-shift deletion), so that no tombstone is needed. No key moves to a slot
/// before its home slot, where a search for the key begins.
void HashMap64::erase_slot(Table& table, Slot* hole) {
  for (Slot* slot = hole + 1; slot->value != 0; ++slot) {
    if (table.slots + home(hash(slot->key), table) > hole) continue;
    *hole = *slot;
    hole = slot;
  }
  *hole = Slot{};
  --num_keys_;
}

void HashMap64::begin_resize(std::uint64_t num_slots) {
  next_ = make_table(num_slots);
  resize_at_ = 0;
  // The resize must end before the new table is full, also if the new table is smaller and only insertions move keys.
  const std::uint64_t room = num_slots / 4 * 3 - std::min<std::uint64_t>(num_keys_, num_slots / 4 * 3 - 1);
  moved_per_insert_ = std::max<std::size_t>(kSlotsMovedMin, (now_.num_slots + kOverflowSlots) / room + 1);
  if (in_sweep_) begin_sweep();
}

void HashMap64::move_some(std::size_t num_slots) {
  const std::uint64_t end = now_.num_slots + kOverflowSlots;
  for (std::size_t num_seen = 0; resize_at_ < end; ++num_seen) {
    Slot& slot = now_.slots[resize_at_++];
    if (slot.value == 0) {
      if (num_seen >= num_slots) break;  // stops only at a free slot, so that no run of keys is split
      continue;
    }
    if (!put(next_, hash(slot.key), slot)) --num_keys_;
  }
  now_.memory.release_before(resize_at_ * sizeof(Slot));
  if (resize_at_ < end) return;
  now_ = std::exchange(next_, Table{});
  resize_at_ = 0;
}

void HashMap64::begin_sweep() {
  in_sweep_ = true;
  sweep_ = 0;
}

bool HashMap64::tidy(std::size_t num_slots, const Keep& keep) {
  if (is_resizing()) {
    move_some(num_slots);
    return true;
  }
  // The table does not shrink during a sweep: the keys that the sweep has not reached lie close together and would
  // overfill a part of the smaller table.
  if (!in_sweep_ && now_.num_slots > kSlotsMin && num_keys_ < now_.num_slots / 5) {
    begin_resize(std::max({kSlotsMin, std::uint64_t{num_keys_} * 2, now_.num_slots / kShrinkMax}));
    return true;
  }
  if (!in_sweep_) return false;
  const std::uint64_t end = now_.num_slots + kOverflowSlots;
  for (; num_slots > 0 && sweep_ < end; --num_slots) {
    Slot& slot = now_.slots[sweep_];
    if (slot.value == 0 || keep(slot.value))
      ++sweep_;
    else
      erase_slot(now_, &slot);  // sweep_ stays, because another key may have moved into this slot
  }
  in_sweep_ = sweep_ < end;
  return true;  // true also right after the end of the sweep, because the next call may begin to shrink the table
}

}  // namespace kvferry::controller
