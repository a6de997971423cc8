#include "kernels/convert_rows.h"

#include <cstring>

#include "kernels/device/element.h"

namespace kvferry {
namespace {

template <class Storage>
KVFERRY_DEVICE Storage read(const std::byte* from) {
  Storage value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class Cache, class Chunk>
KVFERRY_DEVICE void to_chunk(const std::byte* __restrict cache, std::int64_t stride_bytes, std::byte* __restrict chunk,
                             std::size_t count, float inverse_scale) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::byte* const from = cache + static_cast<std::int64_t>(i) * stride_bytes;
    const float value = Cache::to_float(read<typename Cache::Storage>(from));
    chunk[i] = static_cast<std::byte>(Chunk::from_float(value * inverse_scale));
  }
}

template <class Cache, class Chunk>
KVFERRY_DEVICE void to_cache(std::byte* __restrict cache, std::int64_t stride_bytes, const std::byte* __restrict chunk,
                             std::size_t count, float scale) {
  for (std::size_t i = 0; i < count; ++i) {
    const float value = Chunk::to_float(static_cast<std::uint8_t>(chunk[i]));
    const typename Cache::Storage stored = Cache::from_float(value * scale);
    std::memcpy(cache + static_cast<std::int64_t>(i) * stride_bytes, &stored, sizeof stored);
  }
}

// The code for contiguous rows, which the compiler vectorises once for each instruction set below.
template <class Storage>
using Unaligned __attribute__((aligned(1), may_alias)) = Storage;

template <class Cache, class Chunk>
KVFERRY_DEVICE void dense_to_chunk(const std::byte* cache, std::byte* chunk, std::size_t count, float inverse_scale) {
  const auto* __restrict from = reinterpret_cast<const Unaligned<typename Cache::Storage>*>(cache);
  auto* __restrict to = reinterpret_cast<std::uint8_t*>(chunk);
  for (std::size_t i = 0; i < count; ++i) to[i] = Chunk::from_float(Cache::to_float(from[i]) * inverse_scale);
}
template <class Cache, class Chunk>
KVFERRY_DEVICE void dense_to_cache(std::byte* cache, const std::byte* chunk, std::size_t count, float scale) {
  const auto* __restrict from = reinterpret_cast<const std::uint8_t*>(chunk);
  auto* __restrict to = reinterpret_cast<Unaligned<typename Cache::Storage>*>(cache);
  for (std::size_t i = 0; i < count; ++i) to[i] = Cache::from_float(Chunk::to_float(from[i]) * scale);
}

#if defined(__x86_64__)
#define KVFERRY_AVX2 __attribute__((target("avx2")))
#define KVFERRY_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
enum class Vectors { kBaseline, kAvx2, kAvx512 };
const Vectors kVectors = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") ? Vectors::kAvx512
                         : __builtin_cpu_supports("avx2")                                         ? Vectors::kAvx2
                                                                                                  : Vectors::kBaseline;

template <class Cache, class Chunk>
KVFERRY_AVX2 void to_chunk_avx2(const std::byte* cache, std::byte* chunk, std::size_t count, float inverse_scale) {
  dense_to_chunk<Cache, Chunk>(cache, chunk, count, inverse_scale);
}
template <class Cache, class Chunk>
KVFERRY_AVX512 void to_chunk_avx512(const std::byte* cache, std::byte* chunk, std::size_t count, float inverse_scale) {
  dense_to_chunk<Cache, Chunk>(cache, chunk, count, inverse_scale);
}
template <class Cache, class Chunk>
KVFERRY_AVX2 void to_cache_avx2(std::byte* cache, const std::byte* chunk, std::size_t count, float scale) {
  dense_to_cache<Cache, Chunk>(cache, chunk, count, scale);
}
template <class Cache, class Chunk>
KVFERRY_AVX512 void to_cache_avx512(std::byte* cache, const std::byte* chunk, std::size_t count, float scale) {
  dense_to_cache<Cache, Chunk>(cache, chunk, count, scale);
}
#endif

/// Calls convert(Cache{}, Chunk{}) with the classes that convert the two types.
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
#if defined(__x86_64__)
    const bool is_dense = stride_bytes == sizeof(typename Cache::Storage);
    if (is_dense && kVectors == Vectors::kAvx512)
      return to_chunk_avx512<Cache, Chunk>(cache, chunk, count, inverse_scale);
    if (is_dense && kVectors == Vectors::kAvx2) return to_chunk_avx2<Cache, Chunk>(cache, chunk, count, inverse_scale);
#endif
    to_chunk<Cache, Chunk>(cache, stride_bytes, chunk, count, inverse_scale);
  });
}

void convert_to_cache(ElementType cache_type, ElementType chunk_type, std::byte* cache, std::int64_t stride_bytes,
                      const std::byte* chunk, std::size_t count, float scale) {
  with_types(cache_type, chunk_type, [&]<class Cache, class Chunk>(Cache, Chunk) {
#if defined(__x86_64__)
    const bool is_dense = stride_bytes == sizeof(typename Cache::Storage);
    if (is_dense && kVectors == Vectors::kAvx512) return to_cache_avx512<Cache, Chunk>(cache, chunk, count, scale);
    if (is_dense && kVectors == Vectors::kAvx2) return to_cache_avx2<Cache, Chunk>(cache, chunk, count, scale);
#endif
    to_cache<Cache, Chunk>(cache, stride_bytes, chunk, count, scale);
  });
}

}  // namespace kvferry
