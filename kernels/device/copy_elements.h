// Copies elements of any size and strides, one at a time; for caches, chunks and conversions that copy_segment.h does
// not support. Also hashes bytes without copying them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/element.h"
#include "kernels/device/row_cursor.h"
#include "kernels/device/segment_hash.h"
#include "kernels/device/vec_format.h"

namespace kvferry::device {

KVFERRY_DEVICE void copy_bytes(std::byte* to, const std::byte* from, std::uint32_t count) {
  for (std::uint32_t i = 0; i < count; ++i) to[i] = from[i];
}

/// Reads an element at an address that may be unaligned.
template <class Type>
KVFERRY_DEVICE float read_element(const std::byte* from) {
  std::uint32_t bits = 0;
  for (std::uint32_t i = 0; i < sizeof(typename Type::Storage); ++i)
    bits |= static_cast<std::uint32_t>(from[i]) << 8 * i;
  return Type::to_float(static_cast<typename Type::Storage>(bits));
}
template <class Type>
KVFERRY_DEVICE void write_element(std::byte* to, float value) {
  const std::uint32_t bits = Type::from_float(value);
  for (std::uint32_t i = 0; i < sizeof(typename Type::Storage); ++i) to[i] = static_cast<std::byte>(bits >> 8 * i);
}

/// How a single element is copied between chunk and cache; for 16 bytes of a chunk, see vec_format.h.
struct SameElement {
  KVFERRY_DEVICE static void to_chunk(std::byte* chunk, const std::byte* cache, std::uint32_t bytes, float) {
    copy_bytes(chunk, cache, bytes);
  }
  KVFERRY_DEVICE static void to_cache(std::byte* cache, const std::byte* chunk, std::uint32_t bytes, float) {
    copy_bytes(cache, chunk, bytes);
  }
};
template <class Cache, class Chunk>
struct ConvertedElement {
  KVFERRY_DEVICE static void to_chunk(std::byte* chunk, const std::byte* cache, std::uint32_t, float inverse_scale) {
    write_element<Chunk>(chunk, read_element<Cache>(cache) * inverse_scale);
  }
  KVFERRY_DEVICE static void to_cache(std::byte* cache, const std::byte* chunk, std::uint32_t, float scale) {
    write_element<Cache>(cache, read_element<Chunk>(chunk) * scale);
  }
};

/// Copies one element of the run. `index` counts the run's elements in canonical order.
template <class Element, bool kGathers>
KVFERRY_DEVICE void copy_element(const PackPlan& plan, const PackJob& job, std::uint64_t index) {
  const RowCursor cursor(plan, job, index * plan.chunk_element_bytes);
  std::byte* const chunk = cursor.in_chunk();
  std::byte* const row = cursor.cache_row();
  const std::int64_t dim = cursor.column() / plan.chunk_element_bytes;
  std::byte* const cache = row == nullptr ? nullptr : row + dim * cursor.view().dim_stride_bytes;
  if constexpr (kGathers) {
    if (row == nullptr) {
      for (std::uint32_t i = 0; i < plan.chunk_element_bytes; ++i) chunk[i] = std::byte{0};
    } else {
      Element::to_chunk(chunk, cache, plan.chunk_element_bytes, cursor.view().inverse_scale);
    }
  } else if (row != nullptr) {
    Element::to_cache(cache, chunk, plan.chunk_element_bytes, cursor.view().scale);
  }
}

/// Reads a lane's bytes of segment number `segment` of the bytes [bytes, bytes + num_bytes) and hashes them. `bytes`
/// may be unaligned.
class HashLane {
 public:
  KVFERRY_DEVICE HashLane(const std::byte* bytes, std::uint64_t num_bytes, std::uint64_t segment, std::uint32_t lane)
      : bytes_(bytes),
        num_bytes_(num_bytes),
        segment_(segment),
        lane_(lane),
        is_aligned_(reinterpret_cast<std::uintptr_t>(bytes) % kVecBytes == 0) {}

  KVFERRY_DEVICE bool is_whole() const { return true; }

  KVFERRY_DEVICE BlockSums copy_block(const SegmentSecret& secret, std::uint32_t block) const {
    const std::uint32_t quarter = lane_ % kQuarters;
    BlockSums sums;
    KVFERRY_UNROLL
    for (std::uint32_t i = 0; i < kLaneStripes; ++i) {
      const std::uint32_t stripe = stripe_of(lane_, block, i);
      sums.add(secret, quarter, stripe,
               read((segment_ * kSegmentStripes + stripe) * kStripeBytes + quarter * kVecBytes));
    }
    return sums;
  }

 private:
  KVFERRY_DEVICE Vec16 read(std::uint64_t first) const {
    if (is_aligned_ && first + kVecBytes <= num_bytes_) return *reinterpret_cast<const Vec16*>(bytes_ + first);
    Vec16 vec{};
    for (std::uint32_t i = 0; i < kVecBytes && first + i < num_bytes_; ++i)
      vec.word[i / 4] |= static_cast<std::uint32_t>(bytes_[first + i]) << i % 4 * 8;
    return vec;
  }

  const std::byte* bytes_;
  std::uint64_t num_bytes_, segment_;
  std::uint32_t lane_;
  bool is_aligned_;
};

}  // namespace kvferry::device
