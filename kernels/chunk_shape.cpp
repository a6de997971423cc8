#include "kernels/chunk_shape.h"

#include <array>
#include <cmath>
#include <utility>

namespace kvferry {
namespace {

struct TypeFacts {
  std::string_view name;
  std::uint32_t bytes;
};
constexpr std::array<TypeFacts, 6> kTypes{
    {{"bytes", 0}, {"bf16", 2}, {"fp16", 2}, {"fp32", 4}, {"fp8 e4m3", 1}, {"fp8 e5m2", 1}}};

Error bad(std::string what) { return Error{ErrorCode::kInvalidArgument, std::move(what)}; }

Result<void> check_types(const KvLayout& layout, const ChunkFormat& format) {
  for (const ElementType type : {format.cache_type, format.chunk_type})
    if (static_cast<std::size_t>(type) >= kTypes.size())
      return bad(fmt::format("unknown element type {}", static_cast<int>(type)));
  if (const std::uint32_t bytes = bytes_of(format.cache_type); bytes != 0 && bytes != layout.element_bytes)
    return bad(fmt::format("the cache's elements have {} bytes, but an element of type {} has {}", layout.element_bytes,
                           name_of(format.cache_type), bytes));
  if (format.cache_type == format.chunk_type) return {};
  if (bytes_of(format.cache_type) < 2 || bytes_of(format.chunk_type) != 1)
    return bad(fmt::format("cannot convert {} in the cache to {} in chunks; allowed: bf16, fp16 and fp32 to fp8",
                           name_of(format.cache_type), name_of(format.chunk_type)));
  const std::size_t num_planes = layout.layers.size() * layout.planes;
  if (!format.scales.empty() && format.scales.size() != num_planes)
    return bad(fmt::format("got {} scales for {} K and V planes", format.scales.size(), num_planes));
  for (const float scale : format.scales)
    if (!std::isnormal(scale) || !std::isnormal(1 / scale) || scale < 0)
      return bad(
          fmt::format("scale {} is not allowed: it must be positive, and its reciprocal a normal number", scale));
  return {};
}

}  // namespace

std::string_view name_of(ElementType type) { return kTypes[static_cast<std::size_t>(type)].name; }
std::uint32_t bytes_of(ElementType type) { return kTypes[static_cast<std::size_t>(type)].bytes; }

Result<ChunkShape> resolve(const KvLayout& layout, const ChunkFormat& format) {
  KVFERRY_TRY(check_types(layout, format));
  const HeadSlice& heads = format.heads;
  ChunkShape shape{layout.num_kv_heads, 0, 0, layout.num_kv_heads, layout.element_bytes, 0, false};
  if (heads.chunk_heads != 0) {
    if (heads.count == 0 || heads.count > heads.chunk_heads || heads.first_in_chunk > heads.chunk_heads - heads.count)
      return bad(fmt::format("heads [{}, {}) are out of range: the chunk has {}", heads.first_in_chunk,
                             std::uint64_t{heads.first_in_chunk} + heads.count, heads.chunk_heads));
    if (heads.count > layout.num_kv_heads || heads.first_in_cache > layout.num_kv_heads - heads.count)
      return bad(fmt::format("heads [{}, {}) are out of range: the cache has {}", heads.first_in_cache,
                             std::uint64_t{heads.first_in_cache} + heads.count, layout.num_kv_heads));
    shape.chunk_heads = heads.chunk_heads;
    shape.first_in_chunk = heads.first_in_chunk;
    shape.first_in_cache = heads.first_in_cache;
    shape.num_heads = heads.count;
  }
  shape.converts = format.cache_type != format.chunk_type;
  if (shape.converts) shape.chunk_element_bytes = bytes_of(format.chunk_type);
  const std::uint64_t row_bytes = std::uint64_t{layout.head_dim} * shape.chunk_element_bytes;
  if (__builtin_mul_overflow(row_bytes * layout.planes, layout.layers.size(), &shape.bytes_per_token) ||
      __builtin_mul_overflow(shape.bytes_per_token, shape.chunk_heads, &shape.bytes_per_token))
    return bad(fmt::format("bytes per token of a chunk of {} heads don't fit 64 bits", shape.chunk_heads));
  return shape;
}

}  // namespace kvferry
