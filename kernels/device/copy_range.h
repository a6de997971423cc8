// Copies bytes between any two addresses with many threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/portable.h"

namespace kvferry::device {

constexpr std::uint32_t kTileThreads = 128;  // number of threads that copy a tile together
constexpr std::uint32_t kTileVecs = 8;       // number of vectors that a thread copies in a tile
constexpr std::uint64_t kTileBytes = std::uint64_t{kTileThreads} * kTileVecs * kVecBytes;

/// Thread `thread` of kTileThreads copies its part of the kTileBytes from byte `first` on, but no byte from `num_bytes`
/// on; `first` is a multiple of kVecBytes. Copies 16 bytes at a time where both addresses are aligned and 16 bytes are
/// left, otherwise single bytes.
KVFERRY_DEVICE void copy_tile(std::byte* to, const std::byte* from, std::uint64_t num_bytes, std::uint64_t first,
                              std::uint32_t thread) {
  const bool is_aligned =
      (reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from)) % kVecBytes == 0;
  const auto at_vec = [&](std::uint32_t i) { return first + (std::uint64_t{i} * kTileThreads + thread) * kVecBytes; };
  if (is_aligned && first + kTileBytes <= num_bytes) {
    Vec16 vecs[kTileVecs];  // all are read before one is written, so that the reads overlap
    KVFERRY_UNROLL
    for (std::uint32_t i = 0; i < kTileVecs; ++i) vecs[i] = *reinterpret_cast<const Vec16*>(from + at_vec(i));
    KVFERRY_UNROLL
    for (std::uint32_t i = 0; i < kTileVecs; ++i) *reinterpret_cast<Vec16*>(to + at_vec(i)) = vecs[i];
    return;
  }
  for (std::uint32_t i = 0; i < kTileVecs; ++i) {
    const std::uint64_t at = at_vec(i);
    if (is_aligned && at + kVecBytes <= num_bytes) {
      *reinterpret_cast<Vec16*>(to + at) = *reinterpret_cast<const Vec16*>(from + at);
      continue;
    }
    for (std::uint64_t byte = at; byte < at + kVecBytes && byte < num_bytes; ++byte) to[byte] = from[byte];
  }
}

}  // namespace kvferry::device
