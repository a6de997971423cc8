// A chunk key to 32 bits: open addressing in cache lines that grows and shrinks a few lines at a time.
//
// Buckets are a cache line. A key's home is the high half of hash * num_buckets, so homes of any two sizes have the
// same order: a table moves into one of another size from its first bucket to its last, and gives the memory behind
// back on the way. A key that finds its home full goes on to the next bucket, and each bucket counts who passed it by,
// so that a look-up ends at the first bucket that nobody passed and nothing is left behind by an erasure.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <unordered_map>

#include "controller/page_memory.h"
#include "transport/base/chunk_key.h"

namespace kvferry::controller {

using ShortKey = std::uint64_t;  // what engines call their blocks

template <class Key>
struct alignas(64) KeyBucket {
  static constexpr std::size_t kSlots = (64 - 4) / (sizeof(Key) + 4);
  Key keys[kSlots];
  std::uint32_t values[kSlots];  // 0: the slot is free
  std::uint32_t num_passed;      // keys that found this bucket full and lie further on
};

/// Key: ShortKey or ChunkKey. Values are never 0. Threads: one at a time.
/// Cost: insert and erase look at kBucketsPerKeyMax buckets at most, however the keys fall; resizing is the caller's
/// business (begin_pass, advance) and need not be timely: what finds no place is kept aside.
template <class Key>
class KeyMap {
 public:
  using Bucket = KeyBucket<Key>;
  using Value = std::uint32_t;
  using Clean = std::function<Value(Value)>;

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
  /// Where find() begins; brings it nearer. Void after any change.
  const Bucket* prefetch(const Key& key) const {
    const Bucket* home = home_of(hash(key));
    __builtin_prefetch(home);
    return home;
  }
  /// 0: not there.
  Value find(const Bucket* home, const Key& key) const {
    const Value* value = find_from(home, key);
    return value != nullptr ? *value : num_aside_ == 0 ? 0 : find_aside(key);
  }
  Value find(const Key& key) const { return find(home_of(hash(key)), key); }
  /// nullptr: not there. Valid until the next change; to become 0 only by erase().
  Value* find_place(const Key& key);
  void insert(const Key& key, Value value);  // `key` must not be there
  void erase(const Key& key);                // `key` must be there

  std::size_t size() const { return num_keys_ + num_aside_; }
  std::size_t num_buckets() const { return now_.num_buckets; }
  bool wants_resize() const;
  bool in_pass() const { return in_pass_; }
  bool is_resizing() const { return next_.buckets != nullptr; }

  /// A pass visits all values once, and moves them to a table of a better size where wants_resize(). It may begin anew
  /// while one is in progress that does not resize.
  void begin_pass();
  /// Visits `num_buckets` more and a few: `clean` may change a value, or say 0 to erase its key. Empty: changes
  /// nothing. True: the pass has ended. Keys inserted behind the pass are not visited.
  bool advance(std::size_t num_buckets, const Clean& clean);

 private:
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
  static bool equal(const Key& a, const Key& b) {
    std::uint64_t x[sizeof(Key) / 8], y[sizeof(Key) / 8];
    std::memcpy(x, &a, sizeof(Key));
    std::memcpy(y, &b, sizeof(Key));
    if constexpr (sizeof(Key) == 16) return ((x[0] ^ y[0]) | (x[1] ^ y[1])) == 0;
    return x[0] == y[0];
  }
  Bucket* home_of(std::uint64_t h) const {
    const std::uint64_t index = high_half(h, now_.num_buckets);
    if (is_resizing() && index < cursor_) return next_.buckets + high_half(h, next_.num_buckets);
    return now_.buckets + index;
  }
  /// All slots are compared before one is chosen: which of them matches is a coin that branches would lose.
  static const Value* find_from(const Bucket* bucket, const Key& key) {
    for (std::size_t i = 0; i < kBucketsPerKeyMax; ++i, ++bucket) {
      unsigned matches = 0;
      for (unsigned slot = 0; slot < Bucket::kSlots; ++slot)
        matches |= static_cast<unsigned>(equal(bucket->keys[slot], key)) << slot;
      for (; matches != 0; matches &= matches - 1) {  // a free slot may still show a key that was there
        const Value* value = &bucket->values[std::countr_zero(matches)];
        if (*value != 0) return value;
      }
      if (bucket->num_passed == 0) break;
    }
    return nullptr;
  }

  static Table make_table(std::uint64_t num_buckets);
  Value find_aside(const Key& key) const;
  bool place(Bucket* home, const Key& key, Value value);
  void free_slot(Bucket* home, Bucket* bucket, unsigned slot);
  void clean_aside(const Clean& clean);

  std::uint64_t seed_;
  Table now_;
  Table next_;                // while resizing: holds all keys whose home in now_ is below cursor_
  std::uint64_t cursor_ = 0;  // of the pass; while resizing, nobody at or above it has a home below
  bool in_pass_ = false;
  std::size_t num_keys_ = 0;   // in the tables
  std::size_t num_aside_ = 0;  // in aside_; kept apart for look-ups
  std::unordered_map<Key, Value> aside_;
};

extern template class KeyMap<ShortKey>;
extern template class KeyMap<ChunkKey>;

}  // namespace kvferry::controller
