// How 16 bytes of a chunk are stored in the cache: unchanged, or as elements of another type.
#pragma once

#include <cstdint>

#include "kernels/device/element.h"
#include "kernels/device/portable.h"

namespace kvferry::device {

/// Copies bytes unchanged.
struct SameBytes {
  static constexpr std::uint32_t kCacheVecs = 1;  // number of vectors in the cache for 16 bytes of a chunk
  KVFERRY_DEVICE static Vec16 to_chunk(const Vec16* cache, float) { return cache[0]; }
  KVFERRY_DEVICE static void to_cache(const Vec16& chunk, float, Vec16* cache) { cache[0] = chunk; }
};

template <class Storage>
KVFERRY_DEVICE Storage element_at(const Vec16* vecs, std::uint32_t index) {
  constexpr std::uint32_t kPerWord = 4 / sizeof(Storage);
  const std::uint32_t word = vecs[index / (4 * kPerWord)].word[index / kPerWord % 4];
  return static_cast<Storage>(word >> (index % kPerWord * 8 * sizeof(Storage)));
}

/// Stores an element into vectors. The bits for this element must be zero before the call.
template <class Storage>
KVFERRY_DEVICE void put_element(Vec16* vecs, std::uint32_t index, Storage value) {
  constexpr std::uint32_t kPerWord = 4 / sizeof(Storage);
  vecs[index / (4 * kPerWord)].word[index / kPerWord % 4] |= std::uint32_t{value}
                                                             << (index % kPerWord * 8 * sizeof(Storage));
}

/// Converts between fp8 in the chunk and a wider type in the cache.
template <class Cache, class Chunk>
struct Converted {
  static_assert(sizeof(typename Chunk::Storage) == 1);
  static constexpr std::uint32_t kCacheVecs = sizeof(typename Cache::Storage);

  KVFERRY_DEVICE static Vec16 to_chunk(const Vec16* cache, float inverse_scale) {
    Vec16 chunk{};
    KVFERRY_UNROLL
    for (std::uint32_t i = 0; i < kVecBytes; ++i) {
      const float value = Cache::to_float(element_at<typename Cache::Storage>(cache, i));
      put_element(&chunk, i, Chunk::from_float(value * inverse_scale));
    }
    return chunk;
  }
  KVFERRY_DEVICE static void to_cache(const Vec16& chunk, float scale, Vec16* cache) {
    for (std::uint32_t v = 0; v < kCacheVecs; ++v) cache[v] = {};
    KVFERRY_UNROLL
    for (std::uint32_t i = 0; i < kVecBytes; ++i) {
      const float value = Chunk::to_float(element_at<std::uint8_t>(&chunk, i));
      put_element(cache, i, Cache::from_float(value * scale));
    }
  }
};

/// Stands for conversions to a chunk type other than fp8. These have no class that converts 16 bytes at once: their
/// elements are copied one at a time (copy_elements.h).
struct NoFormat {};

}  // namespace kvferry::device
