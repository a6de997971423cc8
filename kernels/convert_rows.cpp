#include "kernels/convert_rows.h"

#include <cstring>
#include <type_traits>

#include "kernels/chunk_shape.h"
#include "kernels/device/element.h"
#include "kernels/element_formats.h"

namespace kvferry {
namespace {

/// The arguments of a conversion of `count` elements to to_float(element) * factor. Addresses may be unaligned.
struct Row {
  const std::byte* from;
  std::int64_t from_stride_bytes;
  std::byte* to;
  std::int64_t to_stride_bytes;
  std::size_t count;
  float factor;
};

template <class From, class To>
KVFERRY_DEVICE void convert_strided(const Row& row) {
  const std::byte* __restrict from = row.from;
  std::byte* __restrict to = row.to;
  for (std::size_t i = 0; i < row.count; ++i, from += row.from_stride_bytes, to += row.to_stride_bytes) {
    typename From::Storage read;
    std::memcpy(&read, from, sizeof read);
    const typename To::Storage stored = To::from_float(From::to_float(read) * row.factor);
    std::memcpy(to, &stored, sizeof stored);
  }
}

template <class Storage>
using Unaligned __attribute__((aligned(1), may_alias)) = Storage;

/// Converts a row whose elements are contiguous on both sides. On x86-64 the compiler vectorises this code for AVX2 and
/// for AVX-512.
template <class From, class To>
KVFERRY_DEVICE void convert_dense(const Row& row) {
  const auto* __restrict from = reinterpret_cast<const Unaligned<typename From::Storage>*>(row.from);
  auto* __restrict to = reinterpret_cast<Unaligned<typename To::Storage>*>(row.to);
  const float factor = row.factor;
  const std::size_t count = row.count;
  for (std::size_t i = 0; i < count; ++i) to[i] = To::from_float(From::to_float(from[i]) * factor);
}

#if defined(__x86_64__)
#define KVFERRY_AVX2 __attribute__((target("avx2")))
#define KVFERRY_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
enum class Vectors { kBaseline, kAvx2, kAvx512 };
const Vectors kVectors = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") ? Vectors::kAvx512
                         : __builtin_cpu_supports("avx2")                                         ? Vectors::kAvx2
                                                                                                  : Vectors::kBaseline;

template <class From, class To>
KVFERRY_AVX2 void convert_avx2(const Row& row) {
  convert_dense<From, To>(row);
}
template <class From, class To>
KVFERRY_AVX512 void convert_avx512(const Row& row) {
  convert_dense<From, To>(row);
}
#endif

template <class From, class To>
void convert_row(const Row& row) {
#if defined(__x86_64__)
  const bool is_dense =
      row.from_stride_bytes == sizeof(typename From::Storage) && row.to_stride_bytes == sizeof(typename To::Storage);
  if (is_dense && kVectors == Vectors::kAvx512) return convert_avx512<From, To>(row);
  if (is_dense && kVectors == Vectors::kAvx2) return convert_avx2<From, To>(row);
#endif
  convert_strided<From, To>(row);
}

void convert(ElementType from, ElementType to, const Row& row) {
  with_element_type(from, [&]<class From>(From) {
    with_element_type(to, [&]<class To>(To) {
      constexpr bool is_both_fp8 = sizeof(typename From::Storage) == 1 && sizeof(typename To::Storage) == 1;
      if constexpr (!is_both_fp8 && !std::is_same_v<From, To>) convert_row<From, To>(row);
    });
  });
}

}  // namespace

void convert_to_chunk(ElementType cache_type, ElementType chunk_type, const std::byte* cache, std::int64_t stride_bytes,
                      std::byte* chunk, std::size_t count, float inverse_scale) {
  convert(cache_type, chunk_type, {cache, stride_bytes, chunk, bytes_of(chunk_type), count, inverse_scale});
}

void convert_to_cache(ElementType cache_type, ElementType chunk_type, std::byte* cache, std::int64_t stride_bytes,
                      const std::byte* chunk, std::size_t count, float scale) {
  convert(chunk_type, cache_type, {chunk, bytes_of(chunk_type), cache, stride_bytes, count, scale});
}

}  // namespace kvferry
