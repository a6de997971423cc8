#include "kernels/convert_rows.h"

#include <cstring>

#include "kernels/device/element.h"

namespace kvferry {
namespace {

template <class Storage>
Storage read(const std::byte* from) {
  Storage value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

/// Calls convert(Cache{}, Chunk{}) with the types' conversions.
template <class Convert>
void with_types(ElementType cache_type, ElementType chunk_type, Convert convert) {
  const auto with_cache = [&](auto cache) {
    if (chunk_type == ElementType::kE4m3)
      convert(cache, device::E4m3{});
    else
      convert(cache, device::E5m2{});
  };
  if (cache_type == ElementType::kBf16)
    with_cache(device::Bf16{});
  else if (cache_type == ElementType::kFp16)
    with_cache(device::Fp16{});
  else
    with_cache(device::Fp32{});
}

}  // namespace

void convert_to_chunk(ElementType cache_type, ElementType chunk_type, const std::byte* cache, std::int64_t stride_bytes,
                      std::byte* chunk, std::size_t count, float inverse_scale) {
  with_types(cache_type, chunk_type, [&]<class Cache, class Chunk>(Cache, Chunk) {
    for (std::size_t i = 0; i < count; ++i, cache += stride_bytes) {
      const float value = Cache::to_float(read<typename Cache::Storage>(cache));
      chunk[i] = static_cast<std::byte>(Chunk::from_float(value * inverse_scale));
    }
  });
}

void convert_to_cache(ElementType cache_type, ElementType chunk_type, std::byte* cache, std::int64_t stride_bytes,
                      const std::byte* chunk, std::size_t count, float scale) {
  with_types(cache_type, chunk_type, [&]<class Cache, class Chunk>(Cache, Chunk) {
    for (std::size_t i = 0; i < count; ++i, cache += stride_bytes) {
      const float value = Chunk::to_float(static_cast<std::uint8_t>(chunk[i]));
      const typename Cache::Storage stored = Cache::from_float(value * scale);
      std::memcpy(cache, &stored, sizeof stored);
    }
  });
}

}  // namespace kvferry
