// A map from keys to small values: a log of the keys, and an open-addressing table of their positions that grows and
// shrinks a few cache lines at a time.
//
// A bucket is one cache line. A search for a key begins at its home bucket; a key whose home bucket is full goes to the
// next bucket with a free slot. Home buckets have the order of the keys' hashes, however many buckets a table has (home
// bucket = high half of hash * num_buckets). So a resize moves the buckets from first to last and releases those it has
// moved. Each bucket counts the keys that passed over it because it was full, so a lookup ends at the first bucket that
// no key passed, and an erasure leaves no tombstone.
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

/// Key: ShortKey or ChunkKey. Values are never 0. Threads: one at a time. Cost: insert and erase touch at most
/// kBucketsPerKeyMax buckets, whatever the keys are. tidy() resizes the table and compacts a sparse log; it may run
/// late, because a key for which all these buckets are full goes to an overflow map.
template <class Key>
class KeyMap {
 public:
  using Log = KeyLog<Key>;
  using Value = typename Log::Value;
  using Clean = std::function<Value(Value)>;
  using Cursor = typename Log::Cursor;

  /// `seed` must be unknown to clients: clients that know it could choose keys that all have the same home bucket.
  explicit KeyMap(std::uint64_t seed);

  /// Returns the hash that determines a key's home bucket. This function is public so that tests can make keys collide.
  std::uint64_t hash(const Key& key) const {
    std::uint64_t words[sizeof(Key) / 8];
    std::memcpy(words, &key, sizeof(Key));
    std::uint64_t h = fold(words[0] ^ seed_, 0x9e3779b97f4a7c15);
    if constexpr (sizeof(Key) == 16) h = fold(h ^ words[1], 0xd1342543de82ef95 ^ seed_);
    return h;
  }
  void prefetch(const Key& key) const { __builtin_prefetch(home_of(hash(key))); }

  /// Returns 0 if `key` is absent. Callers should look up keys in insertion order with one cursor, because most lookups
  /// then are a single step. They must reset the cursor after insert(), finish_erasing() or tidy().
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
  /// Returns nullptr if `key` is absent. The pointer is valid until the next change. Only erase() may set the value to
  /// 0.
  Value* find_place(const Key& key, Cursor& cursor) {
    return find(key, cursor) == 0 ? nullptr : &log_.value(cursor.position);
  }
  void insert(const Key& key, Value value);  // Inserts a key, which must be absent.
  /// Erases the key that `cursor` has just found; the cursor stays usable. The caller must call finish_erasing(), which
  /// frees the memory, before the next insert() or tidy().
  void erase(const Cursor& cursor);
  void finish_erasing();

  std::size_t size() const { return num_keys_; }
  std::size_t num_buckets() const { return now_.num_buckets; }
  const Log& log() const { return log_; }

  /// Makes room for `num_keys` keys. The map must be empty.
  void reserve(std::size_t num_keys);
  /// Returns true if tidy() has to run: the table is over 80 % full or is being resized. Code that fills a reserved
  /// table calls tidy() only then, because tidy() would shrink a table that is mostly empty.
  bool is_crowded() const { return is_resizing() || num_keys_ * 5 > now_.num_buckets * Bucket::kSlots * 4; }

  struct Walk {
    std::size_t segment = 0;
    typename Log::Position position = 0;
  };
  /// While the map is pinned, entries stay in place, so a walk sees every key that exists during the whole walk.
  void set_pinned(bool is_pinned) { is_pinned_ = is_pinned; }
  /// Calls `see(key, value)`, which returns the cost of the call, for the next keys in log order, until the costs add
  /// up to `budget`. A free entry costs 1. Returns false at the end of the log.
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

  /// Starts or restarts a sweep: tidy() passes every value that exists now to its argument `clean` at least once.
  /// Values that are inserted later may be skipped.
  void begin_sweep();
  bool in_sweep() const { return in_sweep_; }
  /// Processes about `num_lines` cache lines for each pending task (resize, compaction, sweep). `clean` returns the new
  /// value, or 0 to erase the key; if `clean` is empty, all values stay as they are. Returns false if no task is left.
  bool tidy(std::size_t num_lines, const Clean& clean);

 private:
  using Position = typename Log::Position;
  struct alignas(64) Bucket {
    static constexpr unsigned kSlots = 10;
    Position positions[kSlots];  // position in the key log; 0: the slot is free
    std::uint16_t tags[kSlots];  // low bits of the hash, which tell nearly all keys apart without reading the log
    std::uint32_t num_passed;    // number of keys that found this bucket full and are stored in a later bucket
  };
  struct Table {
    PageMemory memory;
    Bucket* buckets = nullptr;
    std::uint64_t num_buckets = 0;  // number of home buckets; kBucketsPerKeyMax - 1 more buckets follow
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
    if (is_resizing() && index < resize_at_) return next_.buckets + high_half(h, next_.num_buckets);
    return now_.buckets + index;
  }

  static Table make_table(std::uint64_t num_buckets);
  Position position_of(const Key& key) const;
  Value find_off(const Key& key, Cursor& cursor);
  void add_to_table(Bucket* home, std::uint64_t h, Position position);
  void remove_from_table(Position position);
  void erase_at(Position position);
  bool is_resizing() const { return next_.buckets != nullptr; }
  bool wants_resize() const;
  void resize(std::size_t num_buckets);
  void clean_at(Position position, const Clean& clean);
  void compact(std::size_t num_entries, const Clean& clean);
  void sweep(std::size_t num_entries, const Clean& clean);

  std::uint64_t seed_;
  Log log_;
  Table now_;
  Table next_;                   // during a resize: all keys whose home in now_ lies before resize_at_
  std::uint64_t resize_at_ = 0;  // first bucket that is not moved; keys stored from here on have no home before it
  std::unordered_map<Key, Position> overflow_;
  std::size_t num_keys_ = 0;
  std::vector<Position> erased_;               // positions that finish_erasing() will free
  Position compact_at_ = 0, compact_end_ = 0;  // rest of the segment that compact() empties
  bool is_pinned_ = false;
  bool in_sweep_ = false;
  std::size_t sweep_segment_ = 0;
  Position sweep_position_ = 0;
};

extern template class KeyMap<ShortKey>;
extern template class KeyMap<ChunkKey>;

}  // namespace kvferry::controller
