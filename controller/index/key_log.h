// Keys and their values in insertion order.
//
// Keys of one prefix are inserted together and looked up together. A caller that has found a key therefore first
// compares the next key with the entry right after the found key, which is mostly in the processor's cache already. If
// the next key is not stored there, the hint follower() mostly has the position at which an earlier lookup found it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "controller/index/page_memory.h"
#include "transport/base/chunk_key.h"

namespace kvferry::controller {

using ShortKey = std::uint64_t;  // an engine's hash of a block, or the controller's own key of a block

template <class Key>
inline bool equal_keys(const Key& a, const Key& b) {
  std::uint64_t x[sizeof(Key) / 8], y[sizeof(Key) / 8];
  std::memcpy(x, &a, sizeof(Key));
  std::memcpy(y, &b, sizeof(Key));
  if constexpr (sizeof(Key) == 16) return ((x[0] ^ y[0]) | (x[1] ^ y[1])) == 0;
  return x[0] == y[0];
}

/// The log never moves an entry: to move one, the caller appends it again and frees the old position. Value 0 marks a
/// free entry; its position is reused only after its whole segment is free. A segment has the size of a huge page.
/// Threads: one at a time.
template <class Key>
class KeyLog {
 public:
  using Position = std::uint32_t;  // place of an entry; 0: no entry
  using Value = std::uint32_t;

  /// Points at the entry at `position`. The entry right after it is always readable.
  struct Cursor {
    Position position = 0;
    const Key* key = nullptr;
    const Value* value = nullptr;
  };

  Position append(const Key& key, Value value);
  void free(Position position);

  const Key& key(Position position) const { return segment_of(position).keys[offset_of(position)]; }
  Value& value(Position position) { return segment_of(position).values[offset_of(position)]; }
  Value value(Position position) const { return segment_of(position).values[offset_of(position)]; }
  /// Returns false if the segment of `position` is free.
  bool is_open(Position position) const { return segment_of(position).keys != nullptr; }
  /// Returns true if the entry at `position`, which may lie in a free segment, holds the key `other`.
  bool is_at(Position position, const Key& other) const {
    const Segment& segment = segment_of(position);
    return segment.keys != nullptr && equal_keys(segment.keys[offset_of(position)], other) &&
           segment.values[offset_of(position)] != 0;
  }

  Cursor cursor_at(Position position) const {
    fetch_follower(position);
    const Segment& segment = segment_of(position);
    return {position, segment.keys + offset_of(position), segment.values + offset_of(position)};
  }
  /// Advances the cursor and returns true if the next entry holds `other`.
  bool step(Cursor& cursor, const Key& other) const {
    if (!equal_keys(cursor.key[1], other) || cursor.value[1] == 0) return false;
    ++cursor.key;
    ++cursor.value;
    if (++cursor.position % kGroup == 0) fetch_follower(cursor.position);
    return true;
  }
  /// Returns a hint for a lookup whose next key is not in the entry after `position`: the position at which the last
  /// such lookup found its next key, or 0 if there was none. kGroup positions share one hint.
  Position follower(Position position) const { return segment_of(position).followers[offset_of(position) / kGroup]; }
  void set_follower(Position position, Position follower) {
    segment_of(position).followers[offset_of(position) / kGroup] = follower;
  }

  std::size_t num_segments() const { return segments_.size(); }
  std::size_t num_used() const { return num_used_; }  // number of positions in segments that are not free
  /// A segment has the positions [first_position(), end_position()). A free segment has no positions.
  Position first_position(std::size_t segment) const {
    return static_cast<Position>(segment << kOffsetBits) + (segment == 0 ? 1 : 0);
  }
  Position end_position(std::size_t segment) const {
    return static_cast<Position>(segment << kOffsetBits) + segments_[segment].num_used;
  }
  /// Returns the full segment with the fewest entries, if moving these entries to the end of the log is worth the
  /// effort. Otherwise returns num_segments().
  std::size_t sparse_segment() const;
  /// Returns true if over three in ten positions of a log of several segments are free. Even then sparse_segment() may
  /// find no segment worth moving.
  bool is_sparse() const { return num_used_ - num_live_ > num_used_ / 10 * 3 && num_used_ > kCapacity; }

 private:
  static constexpr std::size_t kSegmentBytes = std::size_t{2} << 20;
  static constexpr std::size_t kEntryBytes = sizeof(Key) + sizeof(Value);
  static constexpr std::uint32_t kGroup = 32;
  static constexpr std::uint32_t kCapacity =
      static_cast<std::uint32_t>(kSegmentBytes * 8 / (kEntryBytes * 8 + 1)) / 1024 * 1024;
  static constexpr unsigned kOffsetBits = kEntryBytes <= 12 ? 18 : 17;
  static_assert(kCapacity < 1U << kOffsetBits);

  struct Segment {
    PageMemory memory;
    Key* keys = nullptr;            // array of kCapacity + 1 keys; the last one stays unused
    Value* values = nullptr;        // values of the keys; an array of the same size as `keys`
    Position* followers = nullptr;  // array of kCapacity / kGroup + 1 hints: see follower()
    std::uint32_t num_used = 0;
    std::uint32_t num_live = 0;
  };

  static std::uint32_t offset_of(Position position) { return position & ((1U << kOffsetBits) - 1); }
  const Segment& segment_of(Position position) const { return segments_[position >> kOffsetBits]; }
  Segment& segment_of(Position position) { return segments_[position >> kOffsetBits]; }

  void fetch_follower(Position position) const {
    const Position next = follower(position);
    if (next == 0) return;
    const Segment& segment = segment_of(next);
    if (segment.keys == nullptr) return;
    const std::uint32_t offset = offset_of(next);
    const char* keys = reinterpret_cast<const char*>(segment.keys + offset);
    for (std::size_t line = 0; line < kGroup * sizeof(Key); line += 64) __builtin_prefetch(keys + line);
    for (std::size_t i = 0; i < kGroup; i += 64 / sizeof(Value)) __builtin_prefetch(segment.values + offset + i);
    __builtin_prefetch(segment.followers + offset / kGroup);
  }
  void open_segment();
  void close_segment(Segment& segment);

  std::vector<Segment> segments_;
  std::vector<std::uint32_t> free_segments_;
  std::size_t head_ = 0;  // segment that append() fills
  std::size_t num_used_ = 0;
  std::size_t num_live_ = 0;
};

extern template class KeyLog<ShortKey>;
extern template class KeyLog<ChunkKey>;

}  // namespace kvferry::controller
