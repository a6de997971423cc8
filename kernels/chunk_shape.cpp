#include "kernels/chunk_shape.h"

#include <algorithm>
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
      return bad(
          fmt::format("unknown element type number {}; allowed: 0 to {}, which stand for bytes, bf16, fp16, fp32, fp8 "
                      "e4m3 and fp8 e5m2",
                      static_cast<int>(type), kTypes.size() - 1));
  if (const std::uint32_t bytes = bytes_of(format.cache_type); bytes != 0 && bytes != layout.element_bytes)
    return bad(fmt::format("the cache's elements have {} bytes, but an element of type {} has {}", layout.element_bytes,
                           name_of(format.cache_type), bytes));
  const std::size_t num_planes = layout.layers.size() * layout.planes;
  if (!format.scales.empty() && format.scales.size() != num_planes)
    return bad(fmt::format("got {} scales for {} planes (K, V or latent); allowed: one for each plane, or none",
                           format.scales.size(), num_planes));
  if (format.cache_type == format.chunk_type) return {};
  const std::uint32_t cache_bytes = bytes_of(format.cache_type), chunk_bytes = bytes_of(format.chunk_type);
  if (cache_bytes == 0 || chunk_bytes == 0 || (cache_bytes == 1 && chunk_bytes == 1))
    return bad(
        fmt::format("cannot convert {} in the cache to {} in chunks; allowed: two of bf16, fp16, fp32 and fp8, of "
                    "which at most one is fp8",
                    name_of(format.cache_type), name_of(format.chunk_type)));
  if (!format.scales.empty() && chunk_bytes != 1)
    return bad(
        fmt::format("scales are given for chunks of {}; only chunks of fp8 have scales", name_of(format.chunk_type)));
  for (const float scale : format.scales)
    if (!std::isnormal(scale) || !std::isnormal(1 / scale) || scale < 0)
      return bad(fmt::format(
          "scale {} is not allowed: scale and 1 / scale must be positive, and must not overflow or underflow", scale));
  return {};
}

__extension__ using Wide = __int128;  // holds the sum of four products, each of a 32-bit count and a 64-bit stride

struct Axis {
  const char* name;
  std::uint32_t count;
  std::int64_t stride_bytes;
  Wide step() const { return stride_bytes < 0 ? -Wide{stride_bytes} : Wide{stride_bytes}; }
  Wide reach() const { return Wide{count - 1} * stride_bytes; }  // distance from the first element to the last
};

Result<void> check_plane(const KvLayout& layout, const PlaneLayout& plane, const std::string& who) {
  std::array axes = {Axis{"block", layout.num_blocks, plane.block_stride_bytes},
                     Axis{"head", layout.num_kv_heads, plane.head_stride_bytes},
                     Axis{"token", layout.block_tokens, plane.token_stride_bytes},
                     Axis{"dim", layout.head_dim, plane.dim_stride_bytes}};
  Wide lowest = plane.base;
  Wide end = Wide{plane.base} + layout.element_bytes;
  for (const Axis& axis : axes) (axis.stride_bytes < 0 ? lowest : end) += axis.reach();
  if (lowest < 0 || end > Wide{INT64_MAX})  // if this is false, every offset in the plane fits std::int64_t
    return bad(
        fmt::format("{}: from address {:#x} on, the strides of {}, {}, {} and {} bytes (block, head, token, dim) reach "
                    "beyond the 63-bit address space",
                    who, plane.base, plane.block_stride_bytes, plane.head_stride_bytes, plane.token_stride_bytes,
                    plane.dim_stride_bytes));

  std::sort(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) { return a.step() < b.step(); });
  // Span in bytes of one element and of the axes checked so far; step() of the next axis must not be smaller.
  Wide inner_bytes = layout.element_bytes;
  for (const Axis& axis : axes) {
    if (axis.count == 1) continue;
    if (axis.step() < inner_bytes)
      return bad(fmt::format("{}: elements overlap, the {} stride of {} bytes must be at least {} (without its sign)",
                             who, axis.name, axis.stride_bytes, static_cast<std::uint64_t>(inner_bytes)));
    inner_bytes += Wide{axis.count - 1} * axis.step();
  }
  return {};
}

Result<void> check_run(const KvLayout& layout, const TokenRun& run) {
  if (run.num_tokens == 0) return {};
  const std::uint64_t end_token = std::uint64_t{run.first_token} + run.num_tokens;
  const std::uint64_t first_block = run.first_token / layout.block_tokens;
  const std::uint64_t end_block = (end_token - 1) / layout.block_tokens + 1;
  for (const LayerLayout& layer : layout.layers) {
    if (layer.group >= run.block_ids.size())
      return bad(
          fmt::format("layer '{}' is in KV group {} (counted from 0), but there are block tables of only {} groups",
                      layer.name, layer.group, run.block_ids.size()));
    const std::vector<BlockId>& table = run.block_ids[layer.group];
    if (table.size() < end_block)
      return bad(fmt::format(
          "layer '{}': tokens [{}, {}) need a table of {} blocks of {} tokens, but the table of KV group {} has {}",
          layer.name, run.first_token, end_token, end_block, layout.block_tokens, layer.group, table.size()));
    for (std::uint64_t i = first_block; i < end_block; ++i) {
      if (table[i] == kNoBlock) continue;
      if (table[i] < 0 || static_cast<std::uint32_t>(table[i]) >= layout.num_blocks)
        return bad(fmt::format(
            "layer '{}': block id {} at index {} of KV group {} is out of range; [0, {}) and {} (no block) are allowed",
            layer.name, table[i], i, layer.group, layout.num_blocks, kNoBlock));
    }
  }
  return {};
}

Result<void> check_chunk(const ChunkShape& shape, std::size_t chunk_bytes, std::uint32_t num_tokens) {
  const Wide needed = Wide{shape.bytes_per_token} * num_tokens;
  if (Wide{chunk_bytes} >= needed) return {};
  return bad(fmt::format("a chunk buffer of {} bytes is too small for {} tokens of {} bytes each", chunk_bytes,
                         num_tokens, shape.bytes_per_token));
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
      return bad(fmt::format("heads [{}, {}) of a chunk are out of range; allowed: one or more of its heads [0, {})",
                             heads.first_in_chunk, std::uint64_t{heads.first_in_chunk} + heads.count,
                             heads.chunk_heads));
    if (heads.count > layout.num_kv_heads || heads.first_in_cache > layout.num_kv_heads - heads.count)
      return bad(fmt::format("heads [{}, {}) of the cache are out of range; allowed: one or more of its heads [0, {})",
                             heads.first_in_cache, std::uint64_t{heads.first_in_cache} + heads.count,
                             layout.num_kv_heads));
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
    return bad(
        fmt::format("the bytes per token of a chunk of {} heads, head_dim {} and element bytes {} don't fit 64 bits",
                    shape.chunk_heads, layout.head_dim, shape.chunk_element_bytes));
  return shape;
}

Result<void> KvLayout::validate() const {
  if (layers.empty()) return bad("the layout of the KV cache has no layers; at least 1 is needed");
  if (num_kv_heads == 0 || head_dim == 0 || element_bytes == 0 || block_tokens == 0 || num_blocks == 0)
    return bad(
        fmt::format("the layout of the KV cache has {} heads, head_dim {}, element bytes {}, block tokens {} and {} "
                    "blocks; each must be at least 1",
                    num_kv_heads, head_dim, element_bytes, block_tokens, num_blocks));
  if (planes != 1 && planes != 2)
    return bad(fmt::format("the layout of the KV cache has {} planes; 1 (latent) or 2 (K, V) are allowed", planes));
  for (const LayerLayout& layer : layers) {
    if (layer.key.base == 0 || (planes == 2 && layer.value.base == 0))
      return bad(
          fmt::format("the layout of the KV cache has no address for layer '{}'; each layer needs one", layer.name));
  }
  return {};
}

Result<void> check_layout(const KvLayout& layout) {
  KVFERRY_TRY(layout.validate());
  const Wide row_bytes = Wide{layout.head_dim} * layout.element_bytes;
  const Wide rows = Wide{layout.num_kv_heads} * layout.planes * layout.layers.size();
  if (row_bytes > Wide{UINT64_MAX} / rows)
    return bad(fmt::format("the KV cache's bytes per token don't fit 64 bits: {} heads, head_dim {}, element bytes {}",
                           layout.num_kv_heads, layout.head_dim, layout.element_bytes));
  for (const LayerLayout& layer : layout.layers) {
    KVFERRY_TRY(check_plane(layout, layer.key, fmt::format("K of layer '{}'", layer.name)));
    if (layout.planes == 1) continue;
    KVFERRY_TRY(check_plane(layout, layer.value, fmt::format("V of layer '{}'", layer.name)));
  }
  return {};
}

Result<void> check_gather(const KvLayout& layout, const ChunkShape& shape, const TokenRun& run,
                          std::size_t chunk_bytes) {
  if (!shape.is_whole())
    return bad(fmt::format(
        "cannot gather {} of a chunk's {} heads: a chunk is gathered whole, because its checksum covers all heads",
        shape.num_heads, shape.chunk_heads));
  KVFERRY_TRY(check_run(layout, run));
  return check_chunk(shape, chunk_bytes, run.num_tokens);
}

Result<void> check_scatter(const KvLayout& layout, const ChunkShape& shape, const TokenRun& run,
                           std::size_t chunk_bytes, std::uint32_t chunk_tokens, std::uint32_t skip_tokens) {
  if (skip_tokens > chunk_tokens || run.num_tokens > chunk_tokens - skip_tokens)
    return bad(fmt::format("{} tokens from token {} on exceed the chunk's {} tokens", run.num_tokens, skip_tokens,
                           chunk_tokens));
  KVFERRY_TRY(check_run(layout, run));
  return check_chunk(shape, chunk_bytes, chunk_tokens);
}

}  // namespace kvferry
