#include "kernels/run_check.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

namespace kvferry {
namespace {

__extension__ using Wide = __int128;  // holds (2^32 - 1) * any stride, four times over

Error bad(std::string what) { return Error{ErrorCode::kInvalidArgument, std::move(what)}; }

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
  if (lowest < 0 || end > Wide{INT64_MAX})  // then every offset within the plane fits std::int64_t
    return bad(fmt::format("{}: its strides reach beyond the 63-bit address space", who));

  std::sort(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) { return a.step() < b.step(); });
  Wide inner_bytes = layout.element_bytes;  // bytes that one step of the axis must at least skip
  for (const Axis& axis : axes) {
    if (axis.count == 1) continue;
    if (axis.step() < inner_bytes)
      return bad(fmt::format("{}: elements overlap, the {} stride of {} bytes must be at least {}", who, axis.name,
                             axis.stride_bytes, static_cast<std::uint64_t>(inner_bytes)));
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
      return bad(fmt::format("layer '{}' is in KV group {}, but the run has block tables of {} groups", layer.name,
                             layer.group, run.block_ids.size()));
    const std::vector<BlockId>& table = run.block_ids[layer.group];
    if (table.size() < end_block)
      return bad(fmt::format("layer '{}': tokens [{}, {}) need {} blocks of {} tokens, but KV group {} has {}",
                             layer.name, run.first_token, end_token, end_block, layout.block_tokens, layer.group,
                             table.size()));
    for (std::uint64_t i = first_block; i < end_block; ++i) {
      if (table[i] == kNoBlock) continue;
      if (table[i] < 0 || static_cast<std::uint32_t>(table[i]) >= layout.num_blocks)
        return bad(
            fmt::format("layer '{}': block id {} at index {} of KV group {} is out of range, [0, {}) and {} allowed",
                        layer.name, table[i], i, layer.group, layout.num_blocks, kNoBlock));
    }
  }
  return {};
}

Result<void> check_chunk(const ChunkShape& shape, std::size_t chunk_bytes, std::uint32_t num_tokens) {
  const Wide needed = Wide{shape.bytes_per_token} * num_tokens;
  if (Wide{chunk_bytes} >= needed) return {};
  return bad(fmt::format("chunk buffer of {} bytes is too small for {} tokens of {} bytes", chunk_bytes, num_tokens,
                         shape.bytes_per_token));
}

}  // namespace

Result<void> check_layout(const KvLayout& layout) {
  KVFERRY_TRY(layout.validate());
  const Wide row_bytes = Wide{layout.head_dim} * layout.element_bytes;
  const Wide rows = Wide{layout.num_kv_heads} * layout.planes * layout.layers.size();
  if (row_bytes > Wide{UINT64_MAX} / rows)
    return bad(fmt::format("KV layout's bytes per token don't fit 64 bits: {} heads, head_dim {}, element bytes {}",
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
    return bad(fmt::format("cannot gather {} of a chunk's {} heads: the checksum covers all of them", shape.num_heads,
                           shape.chunk_heads));
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
