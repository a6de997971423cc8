#include "controller/key_map.h"

#include <algorithm>
#include <utility>

#include "transport/base/check.h"

namespace kvferry::controller {
namespace {

constexpr std::uint64_t kBucketsMin = 16;

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
typename KeyMap<Key>::Value* KeyMap<Key>::find_place(const Key& key) {
  if (const Value* value = find_from(home_of(hash(key)), key)) return const_cast<Value*>(value);
  if (num_aside_ == 0) return nullptr;
  const auto it = aside_.find(key);
  return it == aside_.end() ? nullptr : &it->second;
}

template <class Key>
typename KeyMap<Key>::Value KeyMap<Key>::find_aside(const Key& key) const {
  const auto it = aside_.find(key);
  return it == aside_.end() ? 0 : it->second;
}

template <class Key>
bool KeyMap<Key>::place(Bucket* home, const Key& key, Value value) {
  for (Bucket* bucket = home; bucket != home + kBucketsPerKeyMax; ++bucket) {
    for (unsigned slot = 0; slot < Bucket::kSlots; ++slot) {
      if (bucket->values[slot] != 0) continue;
      bucket->keys[slot] = key;
      bucket->values[slot] = value;
      for (Bucket* passed = home; passed != bucket; ++passed) ++passed->num_passed;
      return true;
    }
  }
  return false;
}

template <class Key>
void KeyMap<Key>::insert(const Key& key, Value value) {
  if (place(home_of(hash(key)), key, value)) {
    ++num_keys_;
  } else {
    aside_.emplace(key, value);
    ++num_aside_;
  }
}

template <class Key>
void KeyMap<Key>::free_slot(Bucket* home, Bucket* bucket, unsigned slot) {
  bucket->values[slot] = 0;
  for (Bucket* passed = home; passed != bucket; ++passed) --passed->num_passed;
  --num_keys_;
}

template <class Key>
void KeyMap<Key>::erase(const Key& key) {
  Bucket* home = home_of(hash(key));
  const Value* value = find_from(home, key);
  if (value == nullptr) {
    KVFERRY_CHECK(aside_.erase(key) == 1, "a key to be erased is not there");
    --num_aside_;
    return;
  }
  const auto offset = static_cast<std::size_t>(reinterpret_cast<const char*>(value) - reinterpret_cast<char*>(home));
  Bucket* bucket = home + offset / sizeof(Bucket);
  free_slot(home, bucket, static_cast<unsigned>(value - bucket->values));
}

/// Fuller than this, keys lie too far from home; emptier, memory is wasted. A table that has just grown is 46 % full.
template <class Key>
bool KeyMap<Key>::wants_resize() const {
  if (is_resizing()) return false;
  const std::uint64_t num_slots = now_.num_buckets * Bucket::kSlots;
  return num_keys_ * 20 > num_slots * 13 || (num_keys_ * 4 < num_slots && now_.num_buckets > kBucketsMin);
}

template <class Key>
void KeyMap<Key>::begin_pass() {
  KVFERRY_CHECK(!is_resizing(), "a pass that moves keys can't begin anew");
  if (wants_resize()) {
    const std::uint64_t num_slots = now_.num_buckets * Bucket::kSlots;
    const bool grows = num_keys_ * 2 > num_slots;
    next_ = make_table(grows ? now_.num_buckets * 7 / 5
                             : std::max<std::uint64_t>(kBucketsMin, num_keys_ * 2 / Bucket::kSlots));
  }
  cursor_ = 0;
  in_pass_ = true;
}

template <class Key>
bool KeyMap<Key>::advance(std::size_t num_buckets, const Clean& clean) {
  KVFERRY_CHECK(in_pass_, "no pass to go on with");
  const std::uint64_t last = now_.num_buckets + kBucketsPerKeyMax - 1;
  const std::uint64_t goal = num_buckets > last - cursor_ ? last : cursor_ + num_buckets;
  // A cut is where nobody passed by: all that have their home before it lie before it.
  for (std::uint64_t i = cursor_; i < last; ++i) {
    Bucket& bucket = now_.buckets[i];
    for (unsigned slot = 0; slot < Bucket::kSlots; ++slot) {
      const Value value = bucket.values[slot];
      if (value == 0) continue;
      const Key& key = bucket.keys[slot];
      const Value kept = clean ? clean(value) : value;
      const std::uint64_t h = is_resizing() || kept == 0 ? hash(key) : 0;
      if (kept != 0 && is_resizing()) {
        if (!place(next_.buckets + high_half(h, next_.num_buckets), key, kept)) {
          aside_.emplace(key, kept);
          ++num_aside_;
          --num_keys_;
        }
      } else if (kept != 0) {
        bucket.values[slot] = kept;
      } else if (is_resizing()) {
        --num_keys_;
      } else {
        free_slot(now_.buckets + high_half(h, now_.num_buckets), &bucket, slot);
      }
    }
    if (i + 1 >= goal && (bucket.num_passed == 0 || !is_resizing())) {
      cursor_ = i + 1;
      break;
    }
  }
  if (is_resizing()) now_.memory.release_before(cursor_ * sizeof(Bucket));
  if (cursor_ < last) return false;
  if (clean) clean_aside(clean);
  if (is_resizing()) now_ = std::exchange(next_, Table{});
  in_pass_ = false;
  return true;
}

template <class Key>
void KeyMap<Key>::clean_aside(const Clean& clean) {
  for (auto it = aside_.begin(); it != aside_.end();) {
    it->second = clean(it->second);
    it = it->second == 0 ? aside_.erase(it) : std::next(it);
  }
  num_aside_ = aside_.size();
}

template class KeyMap<ShortKey>;
template class KeyMap<ChunkKey>;

}  // namespace kvferry::controller
