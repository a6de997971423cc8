// Copies one head's tokens between a block of the cache and rows of a chunk; one function for each kind of strides.
// Private to this folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/kv_layout.h"
#include "kernels/transpose.h"

namespace kvferry {

/// Copies `tokens` tokens of one head between a block of the cache and rows of a chunk. `strides`: the plane's layout;
/// `cache`: address of the first token's first element in the block; `chunk`: address of the first row; `row_bytes`:
/// bytes of each row; `element_bytes`: size of an element in the cache.
using CopyRows = void (*)(const PlaneLayout& strides, std::byte* cache, std::byte* chunk, std::size_t tokens,
                          std::size_t row_bytes, std::size_t element_bytes);

enum class CopyDirection { kGather, kScatter };

template <CopyDirection direction>
void copy_bytes(std::byte* cache, std::byte* chunk, std::size_t size) {
  if constexpr (direction == CopyDirection::kGather)
    std::memcpy(chunk, cache, size);
  else
    std::memcpy(cache, chunk, size);
}

/// Copy function (CopyRows) for planes whose tokens are contiguous.
template <CopyDirection direction>
void copy_run(const PlaneLayout&, std::byte* cache, std::byte* chunk, std::size_t tokens, std::size_t row_bytes,
              std::size_t) {
  copy_bytes<direction>(cache, chunk, tokens * row_bytes);
}

/// Copy function (CopyRows) for planes whose elements are contiguous only within a token.
template <CopyDirection direction>
void copy_each_row(const PlaneLayout& strides, std::byte* cache, std::byte* chunk, std::size_t tokens,
                   std::size_t row_bytes, std::size_t) {
  for (std::size_t t = 0; t < tokens; ++t, cache += strides.token_stride_bytes, chunk += row_bytes)
    copy_bytes<direction>(cache, chunk, row_bytes);
}

/// Copy function (CopyRows) for planes in which the values of one dim are contiguous over the tokens, while the
/// elements of one token are apart.
template <CopyDirection direction, class T>
void copy_transposed(const PlaneLayout& strides, std::byte* cache, std::byte* chunk, std::size_t tokens,
                     std::size_t row_bytes, std::size_t) {
  const auto chunk_stride = static_cast<std::int64_t>(row_bytes);
  if constexpr (direction == CopyDirection::kGather)
    transpose<T>(cache, strides.dim_stride_bytes, chunk, chunk_stride, row_bytes / sizeof(T), tokens);
  else
    transpose<T>(chunk, chunk_stride, cache, strides.dim_stride_bytes, tokens, row_bytes / sizeof(T));
}

template <CopyDirection direction>
void copy_elements(const PlaneLayout& strides, std::byte* cache, std::byte* chunk, std::size_t tokens,
                   std::size_t row_bytes, std::size_t element_bytes) {
  for (std::size_t t = 0; t < tokens; ++t, cache += strides.token_stride_bytes) {
    const std::byte* const row_end = chunk + row_bytes;
    for (std::byte* element = cache; chunk != row_end; element += strides.dim_stride_bytes, chunk += element_bytes)
      copy_bytes<direction>(element, chunk, element_bytes);
  }
}

template <CopyDirection direction>
void copy_nothing(std::byte* chunk, std::size_t size) {
  if constexpr (direction == CopyDirection::kGather) std::memset(chunk, 0, size);
}

template <CopyDirection direction>
CopyRows pick_copy(const KvLayout& layout, const PlaneLayout& plane) {
  const std::int64_t element_bytes = layout.element_bytes;
  if (plane.dim_stride_bytes == element_bytes || layout.head_dim == 1) {
    const bool gapless = plane.token_stride_bytes == element_bytes * layout.head_dim || layout.block_tokens == 1;
    return gapless ? copy_run<direction> : copy_each_row<direction>;
  }
  if (plane.token_stride_bytes == element_bytes) {
    switch (element_bytes) {
      case 1:
        return copy_transposed<direction, std::uint8_t>;
      case 2:
        return copy_transposed<direction, std::uint16_t>;
      case 4:
        return copy_transposed<direction, std::uint32_t>;
      case 8:
        return copy_transposed<direction, std::uint64_t>;
      default:
        break;
    }
  }
  return copy_elements<direction>;
}

/// K, V or the latent of one layer, with the copy functions for its strides.
struct PlanePlan {
  PlaneLayout strides;
  std::uint32_t group;
  float scale;
  CopyRows gather;
  CopyRows scatter;
};

}  // namespace kvferry
