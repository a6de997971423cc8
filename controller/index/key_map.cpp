#include "controller/index/key_map.h"

#include <algorithm>
#include <utility>

#include "transport/base/check.h"

namespace kvferry::controller {
namespace {

constexpr std::uint64_t kBucketsMin = 16;
constexpr std::size_t kEntriesPerLine = 8;  // number of log entries that count as one cache line

/// Returns a bit mask of the slots that hold `wanted`. All slots are compared first: the index of the match is random,
/// so a branch on each slot would be mispredicted.
template <class T, std::size_t kSlots>
unsigned matching(const T (&slots)[kSlots], T wanted) {
  unsigned matches = 0;
#pragma GCC unroll 16
  for (unsigned slot = 0; slot < kSlots; ++slot) matches |= static_cast<unsigned>(slots[slot] == wanted) << slot;
  return matches;
}

}  // namespace

template <class Key>
KeyMap<Key>::KeyMap(std::uint64_t seed) : seed_(seed), now_(make_table(kBucketsMin)) {}

template <class Key>
typename KeyMap<Key>::Table KeyMap<Key>::make_table(std::uint64_t num_buckets) {
  Table table{PageMemory((num_buckets + kBucketsPerKeyMax - 1) * sizeof(Bucket)), nullptr, num_buckets};
  table.buckets = static_cast<Bucket*>(table.memory.data());  // all zeros: every slot is free
  return table;
}

template <class Key>
void KeyMap<Key>::reserve(std::size_t num_keys) {
  KVFERRY_CHECK(num_keys_ == 0 && !is_resizing(), "space is reserved in a table of keys that is in use: it has {} keys",
                num_keys_);
  now_ = make_table(std::max<std::uint64_t>(kBucketsMin, num_keys * 7 / (4 * Bucket::kSlots)));
}

template <class Key>
typename KeyMap<Key>::Position KeyMap<Key>::position_of(const Key& key) const {
  const std::uint64_t h = hash(key);
  const auto tag = static_cast<std::uint16_t>(h);
  const Bucket* bucket = home_of(h);
  for (std::size_t i = 0; i < kBucketsPerKeyMax; ++i, ++bucket) {
    for (unsigned matches = matching(bucket->tags, tag); matches != 0; matches &= matches - 1) {
      const Position position = bucket->positions[std::countr_zero(matches)];
      if (position != 0 && equal_keys(log_.key(position), key)) return position;
    }
    if (bucket->num_passed == 0) break;
  }
  if (overflow_.empty()) return 0;
  const auto it = overflow_.find(key);
  return it == overflow_.end() ? 0 : it->second;
}

/// Finds a key that is not in the entry right after the cursor.
template <class Key>
typename KeyMap<Key>::Value KeyMap<Key>::find_off(const Key& key, Cursor& cursor) {
  const Position before = cursor.position;
  Position position = log_.follower(before);
  if (position == 0 || !log_.is_at(position, key)) {
    position = position_of(key);
    if (position == 0) return 0;
    log_.set_follower(before, position);
  }
  cursor = log_.cursor_at(position);
  return *cursor.value;
}

template <class Key>
void KeyMap<Key>::add_to_table(Bucket* home, std::uint64_t h, Position position) {
  for (Bucket* bucket = home; bucket != home + kBucketsPerKeyMax; ++bucket) {
    if (const unsigned matches = matching(bucket->positions, Position{0}); matches != 0) {
      const int slot = std::countr_zero(matches);
      bucket->positions[slot] = position;
      bucket->tags[slot] = static_cast<std::uint16_t>(h);
      for (Bucket* passed = home; passed != bucket; ++passed) ++passed->num_passed;
      return;
    }
  }
  overflow_.emplace(log_.key(position), position);
}

template <class Key>
void KeyMap<Key>::remove_from_table(Position position) {
  const Key& key = log_.key(position);
  Bucket* home = home_of(hash(key));
  for (Bucket* bucket = home; bucket != home + kBucketsPerKeyMax; ++bucket) {
    if (const unsigned matches = matching(bucket->positions, position); matches != 0) {
      bucket->positions[std::countr_zero(matches)] = 0;
      for (Bucket* passed = home; passed != bucket; ++passed) --passed->num_passed;
      return;
    }
    if (bucket->num_passed == 0) break;
  }
  KVFERRY_CHECK(overflow_.erase(key) == 1, "a key of a map's log is missing in the map's table of {} keys", num_keys_);
}

template <class Key>
void KeyMap<Key>::insert(const Key& key, Value value) {
  const std::uint64_t h = hash(key);
  add_to_table(home_of(h), h, log_.append(key, value));
  ++num_keys_;
}

template <class Key>
void KeyMap<Key>::erase_at(Position position) {
  remove_from_table(position);
  log_.free(position);
  --num_keys_;
}

template <class Key>
void KeyMap<Key>::erase(const Cursor& cursor) {
  prefetch(*cursor.key);
  log_.value(cursor.position) = 0;
  erased_.push_back(cursor.position);
}

template <class Key>
void KeyMap<Key>::finish_erasing() {
  for (const Position position : erased_) erase_at(position);
  erased_.clear();
}

/// Returns true if the table is over 80 % full, so that keys lie too far from their homes, or larger than the smallest
/// table and less than 25 % full, so that memory is wasted. A table that grew at 80 % is 57 % full afterwards.
template <class Key>
bool KeyMap<Key>::wants_resize() const {
  const std::uint64_t num_slots = now_.num_buckets * Bucket::kSlots;
  return num_keys_ * 5 > num_slots * 4 || (num_keys_ * 4 < num_slots && now_.num_buckets > kBucketsMin);
}

template <class Key>
void KeyMap<Key>::resize(std::size_t num_buckets) {
  if (!is_resizing()) {
    const bool grows = num_keys_ * 2 > now_.num_buckets * Bucket::kSlots;
    next_ = make_table(grows ? now_.num_buckets * 7 / 5
                             : std::max<std::uint64_t>(kBucketsMin, num_keys_ * 2 / Bucket::kSlots));
    resize_at_ = 0;
  }
  const std::uint64_t last = now_.num_buckets + kBucketsPerKeyMax - 1;
  const std::uint64_t goal = num_buckets > last - resize_at_ ? last : resize_at_ + num_buckets;
  // Stops only after a bucket that no key passed: then all keys whose home is at or before that bucket are stored at or
  // before it too.
  for (std::uint64_t i = resize_at_;; ++i) {
    const Bucket& bucket = now_.buckets[i];
    for (const Position position : bucket.positions) {
      if (position != 0) __builtin_prefetch(&log_.key(position));
    }
    for (const Position position : bucket.positions) {
      if (position == 0) continue;
      const std::uint64_t h = hash(log_.key(position));
      add_to_table(next_.buckets + high_half(h, next_.num_buckets), h, position);
    }
    if (i + 1 < goal || bucket.num_passed != 0) continue;
    resize_at_ = i + 1;
    break;
  }
  now_.memory.release_before(resize_at_ * sizeof(Bucket));
  if (resize_at_ == last) now_ = std::exchange(next_, Table{});
}

template <class Key>
void KeyMap<Key>::clean_at(Position position, const Clean& clean) {
  const Value value = log_.value(position);
  const Value kept = clean ? clean(value) : value;
  if (kept == 0)
    erase_at(position);
  else
    log_.value(position) = kept;
}

template <class Key>
void KeyMap<Key>::compact(std::size_t num_entries, const Clean& clean) {
  if (compact_at_ == compact_end_) {
    const std::size_t segment = log_.sparse_segment();
    if (segment == log_.num_segments()) return;
    compact_at_ = log_.first_position(segment);
    compact_end_ = log_.end_position(segment);
  }
  for (; num_entries > 0 && compact_at_ != compact_end_; --num_entries, ++compact_at_) {
    if (!log_.is_open(compact_at_)) {  // the segment is free, because its last entry was erased
      compact_at_ = compact_end_;
      break;
    }
    if (log_.value(compact_at_) == 0) continue;
    clean_at(compact_at_, clean);  // cleaned now, because a running sweep may already be past the entry's new position
    if (!log_.is_open(compact_at_) || log_.value(compact_at_) == 0) continue;
    const Key key = log_.key(compact_at_);
    const Value value = log_.value(compact_at_);
    remove_from_table(compact_at_);
    log_.free(compact_at_);
    const std::uint64_t h = hash(key);
    add_to_table(home_of(h), h, log_.append(key, value));
  }
}

template <class Key>
void KeyMap<Key>::begin_sweep() {
  in_sweep_ = true;
  sweep_segment_ = 0;
  sweep_position_ = 0;
}

template <class Key>
void KeyMap<Key>::sweep(std::size_t num_entries, const Clean& clean) {
  for (; sweep_segment_ < log_.num_segments(); ++sweep_segment_) {
    sweep_position_ = std::max(sweep_position_, log_.first_position(sweep_segment_));
    for (; sweep_position_ < log_.end_position(sweep_segment_); ++sweep_position_, --num_entries) {
      if (num_entries == 0) return;
      if (log_.value(sweep_position_) != 0) clean_at(sweep_position_, clean);
    }
  }
  in_sweep_ = false;
}

template <class Key>
bool KeyMap<Key>::tidy(std::size_t num_lines, const Clean& clean) {
  const bool resizes = is_resizing() || wants_resize();
  if (resizes) resize(num_lines);
  const bool moves = !is_pinned_ && (compact_at_ != compact_end_ || log_.is_sparse());
  if (moves) compact(num_lines * kEntriesPerLine, clean);
  if (in_sweep_) sweep(num_lines * kEntriesPerLine, clean);
  const bool may_move = !is_pinned_ && (compact_at_ != compact_end_ ||
                                        (log_.is_sparse() && log_.sparse_segment() != log_.num_segments()));
  return is_resizing() || wants_resize() || in_sweep_ || may_move;
}

template class KeyMap<ShortKey>;
template class KeyMap<ChunkKey>;

}  // namespace kvferry::controller
