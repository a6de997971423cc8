// Converts rows of elements between types, in host memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/packer.h"

namespace kvferry {

/// Converts `count` elements of cache_type, stride_bytes apart, to contiguous elements chunk_type(x * inverse_scale).
/// Addresses may be unaligned; the types must be a pair that resolve() allows.
void convert_to_chunk(ElementType cache_type, ElementType chunk_type, const std::byte* cache, std::int64_t stride_bytes,
                      std::byte* chunk, std::size_t count, float inverse_scale);

/// Converts contiguous elements of chunk_type to cache_type(x * scale).
void convert_to_cache(ElementType cache_type, ElementType chunk_type, std::byte* cache, std::int64_t stride_bytes,
                      const std::byte* chunk, std::size_t count, float scale);

}  // namespace kvferry
