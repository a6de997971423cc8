// Converts rows of elements between types, in host memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/packer.h"

namespace kvferry {

/// Converts `count` elements x of cache_type, stride_bytes apart, to contiguous elements chunk_type(x * inverse_scale).
/// Addresses may be unaligned; the types must differ and be a pair that resolve() allows.
void convert_to_chunk(ElementType cache_type, ElementType chunk_type, const std::byte* cache, std::int64_t stride_bytes,
                      std::byte* chunk, std::size_t count, float inverse_scale);

/// Converts `count` contiguous elements x of chunk_type to elements cache_type(x * scale), stride_bytes apart. The same
/// addresses and types are allowed as for convert_to_chunk().
void convert_to_cache(ElementType cache_type, ElementType chunk_type, std::byte* cache, std::int64_t stride_bytes,
                      const std::byte* chunk, std::size_t count, float scale);

}  // namespace kvferry
