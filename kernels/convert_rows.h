// Rows of elements from one type to another, in host memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/packer.h"

namespace kvferry {

/// `count` elements of cache_type, stride_bytes apart, to fp8 side by side: fp8(x * inverse_scale). No address needs to
/// be aligned. The types are ones that resolve() allows.
void convert_to_chunk(ElementType cache_type, ElementType chunk_type, const std::byte* cache, std::int64_t stride_bytes,
                      std::byte* chunk, std::size_t count, float inverse_scale);

/// The way back: fp8 * scale.
void convert_to_cache(ElementType cache_type, ElementType chunk_type, std::byte* cache, std::int64_t stride_bytes,
                      const std::byte* chunk, std::size_t count, float scale);

}  // namespace kvferry
