// Transposes a matrix in tiles whose rows have 64 bytes, on processors with AVX-512. Private to this folder.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvferry {

constexpr std::size_t kWideTileBytes = 64;

#define KVFERRY_AVX512_TILES __attribute__((target("avx512f,avx512bw")))

/// Returns a vector of the elements that `picks` names: number i is element i of `a`, and number i plus the number of
/// elements in a vector is element i of `b`.
template <class T>
KVFERRY_AVX512_TILES inline __m512i pick(__m512i a, __m512i picks, __m512i b) {
  if constexpr (sizeof(T) == 2) return _mm512_permutex2var_epi16(a, picks, b);
  if constexpr (sizeof(T) == 4) return _mm512_permutex2var_epi32(a, picks, b);
  return _mm512_permutex2var_epi64(a, picks, b);
}

/// Does what transpose_tile() does, in the same way, for a tile whose rows have 64 bytes.
template <class T>
KVFERRY_AVX512_TILES inline void transpose_wide_tile(const std::byte* src, std::int64_t src_stride, std::byte* dst,
                                                     std::int64_t dst_stride) {
  constexpr std::size_t n = kWideTileBytes / sizeof(T);
  alignas(kWideTileBytes) static constexpr auto kPicks = [] {  // interleaves the first or the second halves of vectors
    std::array<std::array<T, n>, 2> picks{};
    for (std::size_t half = 0; half < 2; ++half)
      for (std::size_t i = 0; i < n; ++i) picks[half][i] = static_cast<T>(half * n / 2 + i / 2 + i % 2 * n);
    return picks;
  }();
  const __m512i first = _mm512_load_si512(kPicks[0].data()), second = _mm512_load_si512(kPicks[1].data());
  __m512i rows[n], next[n];
#pragma GCC unroll 32
  for (std::size_t r = 0; r < n; ++r) rows[r] = _mm512_loadu_si512(src + static_cast<std::int64_t>(r) * src_stride);
#pragma GCC unroll 5
  for (std::size_t round = 1; round < n; round *= 2) {
#pragma GCC unroll 16
    for (std::size_t i = 0; i < n / 2; ++i) {
      next[2 * i] = pick<T>(rows[i], first, rows[i + n / 2]);
      next[2 * i + 1] = pick<T>(rows[i], second, rows[i + n / 2]);
    }
#pragma GCC unroll 32
    for (std::size_t r = 0; r < n; ++r) rows[r] = next[r];
  }
#pragma GCC unroll 32
  for (std::size_t r = 0; r < n; ++r) _mm512_storeu_si512(dst + static_cast<std::int64_t>(r) * dst_stride, rows[r]);
}

inline const bool kHasWideTiles = __builtin_cpu_supports("avx512bw");

/// Returns true if the processor can do transpose_wide(), and if the matrix consists of whole tiles.
template <class T>
bool suits_wide_tiles(std::size_t rows, std::size_t cols) {
  constexpr std::size_t n = kWideTileBytes / sizeof(T);
  return kHasWideTiles && rows % n == 0 && cols % n == 0;
}

/// Does what transpose() does. suits_wide_tiles() must have returned true.
template <class T>
KVFERRY_AVX512_TILES void transpose_wide(const std::byte* src, std::int64_t src_stride, std::byte* dst,
                                         std::int64_t dst_stride, std::size_t rows, std::size_t cols) {
  constexpr std::size_t n = kWideTileBytes / sizeof(T);
  for (std::size_t c = 0; c < cols; c += n)
    for (std::size_t r = 0; r < rows; r += n)
      transpose_wide_tile<T>(src + static_cast<std::int64_t>(r) * src_stride + c * sizeof(T), src_stride,
                             dst + static_cast<std::int64_t>(c) * dst_stride + r * sizeof(T), dst_stride);
}

}  // namespace kvferry

#endif
