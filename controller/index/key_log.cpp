#include "controller/index/key_log.h"

#include "transport/base/check.h"

namespace kvferry::controller {

template <class Key>
typename KeyLog<Key>::Position KeyLog<Key>::append(const Key& key, Value value) {
  if (segments_.empty() || segments_[head_].keys == nullptr || segments_[head_].num_used == kCapacity) open_segment();
  Segment& segment = segments_[head_];
  const std::uint32_t offset = segment.num_used++;
  segment.keys[offset] = key;
  segment.values[offset] = value;
  ++segment.num_live;
  ++num_used_;
  ++num_live_;
  return static_cast<Position>(head_ << kOffsetBits) + offset;
}

template <class Key>
void KeyLog<Key>::free(Position position) {
  Segment& segment = segment_of(position);
  KVFERRY_CHECK(segment.num_live > 0, "the entry at position {} of a log of keys is freed twice", position);
  segment.values[offset_of(position)] = 0;
  --segment.num_live;
  --num_live_;
  if (segment.num_live == 0 && segment.num_used == kCapacity) close_segment(segment);
}

template <class Key>
void KeyLog<Key>::open_segment() {
  if (free_segments_.empty()) {
    KVFERRY_CHECK(segments_.size() < std::size_t{1} << (32 - kOffsetBits),
                  "a log of keys is full: it has {} segments, which is the limit", segments_.size());
    segments_.emplace_back();
    head_ = segments_.size() - 1;
  } else {
    head_ = free_segments_.back();
    free_segments_.pop_back();
  }
  Segment& segment = segments_[head_];
  // The log's only segment uses small pages, so that a small table does not occupy a huge page.
  segment.memory =
      PageMemory(kSegmentBytes, segments_.size() > 1 ? PageMemory::Pages::kHuge : PageMemory::Pages::kSmall);
  char* data = static_cast<char*>(segment.memory.data());
  segment.keys = reinterpret_cast<Key*>(data);
  segment.values = reinterpret_cast<Value*>(data + (kCapacity + 1) * sizeof(Key));
  segment.followers = reinterpret_cast<Position*>(segment.values + kCapacity + 1);
  static_assert((kCapacity + 1) * kEntryBytes + (kCapacity / kGroup + 1) * 4 <= kSegmentBytes);
  segment.num_used = head_ == 0 ? 1 : 0;  // position 0 stays unused, because it stands for "no entry"
  num_used_ += segment.num_used;
}

template <class Key>
void KeyLog<Key>::close_segment(Segment& segment) {
  num_used_ -= segment.num_used;
  free_segments_.push_back(static_cast<std::uint32_t>(&segment - segments_.data()));
  segment = Segment{};
}

template <class Key>
std::size_t KeyLog<Key>::sparse_segment() const {
  if (!is_sparse()) return num_segments();
  std::size_t best = num_segments();
  std::uint32_t fewest = kCapacity / 8 * 7;
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    const Segment& segment = segments_[i];
    if (segment.num_used < kCapacity || segment.num_live >= fewest) continue;
    best = i;
    fewest = segment.num_live;
  }
  return best;
}

template class KeyLog<ShortKey>;
template class KeyLog<ChunkKey>;

}  // namespace kvferry::controller
