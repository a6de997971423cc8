// A chunk key to 32 bits: a log of keys, and an open-addressing table of their positions that grows and shrinks a few
// cache lines at a time.
//
// Buckets are a cache line. A key's home is the high half of hash * num_buckets, so homes of any two sizes have the
// same order: a table moves into one of another size from its first bucket to its last, and gives the memory behind
// back on the way. A key that finds its home full goes on to the next bucket, and each bucket counts who passed it by,
// so that a look-up ends at the first bucket that nobody passed and nothing is left behind by an erasure.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <unordered_map>
#include <vector>

#include "controller/index/key_log.h"

namespace kvferry::controller {

/// Key: ShortKey or ChunkKey. Values are never 0. Threads: one at a time.
/// Cost: insert and erase look at kBucketsPerKeyMax buckets at most, however the keys fall. Resizing, and moving
/// entries together where most of the log is free, are tidy()'s business and need not be timely: what finds no place in
/// the table is kept aside.
template <class Key>
class KeyMap {
 public:
  using Value = std::uint32_t;
  using Clean = std::function<Value(Value)>;
  using Cursor = typename KeyLog<Key>::Cursor;

  /// `seed` should be unknown to whoever chooses keys: who knows it can make them all fall on one place.
  explicit KeyMap(std::uint64_t seed);

  /// Decides the home; public so that tests can make keys fall together.
  std::uint64_t hash(const Key& key) const {
    std::uint64_t words[sizeof(Key) / 8];
    std::memcpy(words, &key, sizeof(Key));
    std::uint64_t h = fold(words[0] ^ seed_, 0x9e3779b97f4a7c15);
    if constexpr (sizeof(Key) == 16) h = fold(h ^ words[1], 0xd1342543de82ef95 ^ seed_);
    return h;
  }
  void prefetch(const Key& key) const { __builtin_prefetch(home_of(hash(key))); }

  /// 0: not there. For one key after the other, in the order in which they came, with a `cursor` that is new
  /// after each insert() and tidy(): then most take but a step.
  Value find(const Key& key, Cursor& cursor) {
    if (cursor.position != 0) {
      if (log_.step(cursor, key)) return *cursor.value;
      return find_off(key, cursor);
    }
    const Position position = position_of(key);
    if (position == 0) return 0;
    cursor = log_.cursor_at(position);
    return *cursor.value;
  }
  Value find(const Key& key) const {
    const Position position = position_of(key);
    return position == 0 ? 0 : log_.value(position);
  }
  /// nullptr: not there. Valid until the next change; to become 0 only by erase().
  Value* find_place(const Key& key, Cursor& cursor) {
    return find(key, cursor) == 0 ? nullptr : &log_.value(cursor.position);
  }
  void insert(const Key& key, Value value);  // `key` must not be there
  /// Of the key that `cursor` has just found: it is not there any more, and trails may go on. What it took is free after
  /// finish_erasing(), which comes before any other change.
  void erase(const Cursor& cursor);
  void finish_erasing();

  std::size_t size() const { return num_keys_; }
  std::size_t num_buckets() const { return now_.num_buckets; }
  const KeyLog<Key>& log() const { return log_; }

  /// Room for so many keys at once; only while there are none.
  void reserve(std::size_t num_keys);
  /// There are more keys than there is room for; tidy() makes it. A reserved table that is not full yet wants to
  /// shrink.
  bool is_crowded() const { return is_resizing() || num_keys_ * 5 > now_.num_buckets * Bucket::kSlots * 4; }

  struct Walk {
    std::size_t segment = 0;
    typename KeyLog<Key>::Position position = 0;
  };
  /// While pinned, entries stay where they are, so that a walk misses none that is there from its begin to its end.
  void set_pinned(bool is_pinned) { is_pinned_ = is_pinned; }
  /// Shows keys and their values in the order of the log until `see(key, value)`, which says what it cost, has cost
  /// `budget`. False: it is at the end.
  template <class See>
  bool walk(Walk& at, std::size_t budget, const See& see) const {
    for (; at.segment < log_.num_segments(); ++at.segment) {
      at.position = std::max(at.position, log_.first_position(at.segment));
      for (; at.position < log_.end_position(at.segment); ++at.position) {
        if (budget == 0) return true;
        const Value value = log_.value(at.position);
        budget -= std::min(budget, value == 0 ? 1 : see(log_.key(at.position), value));
      }
    }
    return false;
  }

  /// A sweep shows all values that are there now to tidy()'s `clean`, once or more; those that come later need not be
  /// shown. It may begin anew at any time.
  void begin_sweep();
  bool in_sweep() const { return in_sweep_; }
  /// Looks at about `num_lines` cache lines for each thing that is to be done: resizing, moving together, sweeping.
  /// `clean` may change a value, or say 0 to erase its key. Empty: changes nothing. False: nothing is left to do.
  bool tidy(std::size_t num_lines, const Clean& clean);

 private:
  using Position = typename KeyLog<Key>::Position;
  struct alignas(64) Bucket {
    static constexpr unsigned kSlots = 10;
    Position positions[kSlots];  // 0: the slot is free
    std::uint16_t tags[kSlots];  // of the hash: nearly all other keys are told apart without a look at the log
    std::uint32_t num_passed;    // keys that found this bucket full and lie further on
  };
  struct Table {
    PageMemory memory;
    Bucket* buckets = nullptr;
    std::uint64_t num_buckets = 0;  // homes; kBucketsPerKeyMax - 1 more follow
  };
  static constexpr std::size_t kBucketsPerKeyMax = 64;

  __extension__ typedef unsigned __int128 Wide;
  static std::uint64_t high_half(std::uint64_t a, std::uint64_t b) {
    return static_cast<std::uint64_t>((Wide{a} * b) >> 64);
  }
  static std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
    const Wide product = Wide{a} * b;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
  }
  Bucket* home_of(std::uint64_t h) const {
    const std::uint64_t index = high_half(h, now_.num_buckets);
    if (is_resizing() && index < cursor_) return next_.buckets + high_half(h, next_.num_buckets);
    return now_.buckets + index;
  }

  static Table make_table(std::uint64_t num_buckets);
  Position position_of(const Key& key) const;
  Value find_off(const Key& key, Cursor& cursor);
  void enter(Bucket* home, std::uint64_t h, Position position);
  void leave(Position position);
  void erase_at(Position position);
  bool is_resizing() const { return next_.buckets != nullptr; }
  bool wants_resize() const;
  void resize(std::size_t num_buckets);
  void show(Position position, const Clean& clean);
  void move_together(std::size_t num_entries, const Clean& clean);
  void sweep(std::size_t num_entries, const Clean& clean);

  std::uint64_t seed_;
  KeyLog<Key> log_;
  Table now_;
  Table next_;                // while resizing: holds all keys whose home in now_ is below cursor_
  std::uint64_t cursor_ = 0;  // of the resizing: nobody at or above it has a home below
  std::unordered_map<Key, Position> aside_;
  std::size_t num_keys_ = 0;
  std::vector<Position> erased_;          // until finish_erasing()
  Position moving_ = 0, moving_end_ = 0;  // what move_together() has yet to look at
  bool is_pinned_ = false;
  bool in_sweep_ = false;
  std::size_t sweep_segment_ = 0;
  Position sweep_position_ = 0;
};

extern template class KeyMap<ShortKey>;
extern template class KeyMap<ChunkKey>;

}  // namespace kvferry::controller
