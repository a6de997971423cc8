// Transposes a matrix of 1-, 2-, 4- or 8-byte elements in square tiles. Their rows have 16 bytes, or 64 where
// transpose_wide.h suits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernels/transpose_wide.h"

namespace kvferry {

constexpr std::size_t kNarrowTileBytes = 16;

/// A 16-byte vector of T. The type is aligned, but matrices need not be, since vectors are loaded and stored by memcpy.
template <class T>
struct TileRow {
  using Type __attribute__((vector_size(kNarrowTileBytes))) = T;
};

/// Returns {a[first], b[first], a[first + 1], b[first + 1], ...}, as many elements as a vector has.
template <std::size_t first, class Vector, std::size_t... i>
inline Vector interleave(Vector a, Vector b, std::index_sequence<i...>) {
  return __builtin_shufflevector(a, b, static_cast<int>(first + i / 2 + (i % 2) * sizeof...(i))...);
}

/// Sets dst(c, r) = src(r, c) for a square tile of kNarrowTileBytes / sizeof(T) rows. Strides are in bytes, between
/// rows.
template <class T>
inline void transpose_tile(const std::byte* src, std::int64_t src_stride, std::byte* dst, std::int64_t dst_stride) {
  constexpr std::size_t n = kNarrowTileBytes / sizeof(T);
  using Vector = typename TileRow<T>::Type;
  Vector rows[n], next[n];
  for (std::size_t r = 0; r < n; ++r)
    std::memcpy(&rows[r], src + static_cast<std::int64_t>(r) * src_stride, kNarrowTileBytes);
  // Interleaving row i with row i + n/2 rotates the bits of an element's (row, column) number by one; after log2(n)
  // rounds row and column have changed places.
  for (std::size_t round = 1; round < n; round *= 2) {
    for (std::size_t i = 0; i < n / 2; ++i) {
      next[2 * i] = interleave<0>(rows[i], rows[i + n / 2], std::make_index_sequence<n>{});
      next[2 * i + 1] = interleave<n / 2>(rows[i], rows[i + n / 2], std::make_index_sequence<n>{});
    }
    std::memcpy(rows, next, sizeof rows);
  }
  for (std::size_t r = 0; r < n; ++r)
    std::memcpy(dst + static_cast<std::int64_t>(r) * dst_stride, &rows[r], kNarrowTileBytes);
}

/// Sets dst(c, r) = src(r, c) for `rows` x `cols` elements; rows are contiguous. Strides are in bytes, between
/// rows. No address needs to be aligned; the matrices must not overlap.
template <class T>
inline void transpose(const std::byte* src, std::int64_t src_stride, std::byte* dst, std::int64_t dst_stride,
                      std::size_t rows, std::size_t cols) {
#if defined(__x86_64__)
  if constexpr (sizeof(T) > 1)  // AVX-512BW can't pick single bytes
    if (suits_wide_tiles<T>(rows, cols)) return transpose_wide<T>(src, src_stride, dst, dst_stride, rows, cols);
#endif
  constexpr std::size_t n = kNarrowTileBytes / sizeof(T);
  const std::size_t tiled_rows = rows - rows % n;
  const std::size_t tiled_cols = cols - cols % n;
  const auto at = [](auto* matrix, std::int64_t stride, std::size_t r, std::size_t c) {
    return matrix + static_cast<std::int64_t>(r) * stride + c * sizeof(T);
  };
  const auto copy_elements = [&](std::size_t first_row, std::size_t first_col, std::size_t end_col) {
    for (std::size_t c = first_col; c < end_col; ++c)
      for (std::size_t r = first_row; r < rows; ++r)
        std::memcpy(at(dst, dst_stride, c, r), at(src, src_stride, r, c), sizeof(T));
  };
  for (std::size_t c = 0; c < tiled_cols; c += n)
    for (std::size_t r = 0; r < tiled_rows; r += n)
      transpose_tile<T>(at(src, src_stride, r, c), src_stride, at(dst, dst_stride, c, r), dst_stride);
  copy_elements(tiled_rows, 0, tiled_cols);  // copies the part below the tiles
  copy_elements(0, tiled_cols, cols);        // copies the columns right of the tiles
}

}  // namespace kvferry
