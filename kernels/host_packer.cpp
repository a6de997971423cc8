#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/chunk_shape.h"
#include "kernels/convert_rows.h"
#include "kernels/packer.h"
#include "kernels/run_check.h"
#include "kernels/transpose.h"
#include "transport/base/checksum.h"

namespace kvferry {
namespace {

/// Copies `tokens` tokens of one head between a block (cache: the first token's first element, `strides` its plane) and
/// chunk rows of row_bytes bytes each, the first at `chunk`. element_bytes: of the cache.
using CopyRows = void (*)(const PlaneLayout& strides, std::byte* cache, std::byte* chunk, std::size_t tokens,
                          std::size_t row_bytes, std::size_t element_bytes);

enum class Direction { kGather, kScatter };

template <Direction direction>
void copy_bytes(std::byte* cache, std::byte* chunk, std::size_t size) {
  if constexpr (direction == Direction::kGather)
    std::memcpy(chunk, cache, size);
  else
    std::memcpy(cache, chunk, size);
}

/// Tokens follow each other without a gap.
template <Direction direction>
void copy_run(const PlaneLayout&, std::byte* cache, std::byte* chunk, std::size_t tokens, std::size_t row_bytes,
              std::size_t) {
  copy_bytes<direction>(cache, chunk, tokens * row_bytes);
}

/// A token's elements follow each other, tokens lie apart.
template <Direction direction>
void copy_each_row(const PlaneLayout& strides, std::byte* cache, std::byte* chunk, std::size_t tokens,
                   std::size_t row_bytes, std::size_t) {
  for (std::size_t t = 0; t < tokens; ++t, cache += strides.token_stride_bytes, chunk += row_bytes)
    copy_bytes<direction>(cache, chunk, row_bytes);
}

/// Tokens of one dim follow each other, dims lie apart.
template <Direction direction, class T>
void copy_transposed(const PlaneLayout& strides, std::byte* cache, std::byte* chunk, std::size_t tokens,
                     std::size_t row_bytes, std::size_t) {
  const auto chunk_stride = static_cast<std::int64_t>(row_bytes);
  if constexpr (direction == Direction::kGather)
    transpose<T>(cache, strides.dim_stride_bytes, chunk, chunk_stride, row_bytes / sizeof(T), tokens);
  else
    transpose<T>(chunk, chunk_stride, cache, strides.dim_stride_bytes, tokens, row_bytes / sizeof(T));
}

template <Direction direction>
void copy_elements(const PlaneLayout& strides, std::byte* cache, std::byte* chunk, std::size_t tokens,
                   std::size_t row_bytes, std::size_t element_bytes) {
  for (std::size_t t = 0; t < tokens; ++t, cache += strides.token_stride_bytes) {
    const std::byte* const row_end = chunk + row_bytes;
    for (std::byte* element = cache; chunk != row_end; element += strides.dim_stride_bytes, chunk += element_bytes)
      copy_bytes<direction>(element, chunk, element_bytes);
  }
}

template <Direction direction>
void copy_nothing(std::byte* chunk, std::size_t size) {
  if constexpr (direction == Direction::kGather) std::memset(chunk, 0, size);
}

template <Direction direction>
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

/// One K or V of one layer, with the copies that fit its strides.
struct PlanePlan {
  PlaneLayout strides;
  std::uint32_t group;
  float scale;
  CopyRows gather;
  CopyRows scatter;
};

class HostPacker final : public Packer {
 public:
  HostPacker(KvLayout layout, const ChunkFormat& format, const ChunkShape& shape)
      : layout_(std::move(layout)), cache_type_(format.cache_type), chunk_type_(format.chunk_type), shape_(shape) {
    const auto add = [&](const LayerLayout& layer, const PlaneLayout& plane) {
      planes_.push_back({plane, layer.group, format.scales.empty() ? 1 : format.scales[planes_.size()],
                         pick_copy<Direction::kGather>(layout_, plane),
                         pick_copy<Direction::kScatter>(layout_, plane)});
    };
    for (const LayerLayout& layer : layout_.layers) {
      add(layer, layer.key);
      if (layout_.planes == 2) add(layer, layer.value);
    }
  }
  const KvLayout& layout() const override { return layout_; }
  std::uint64_t chunk_bytes_per_token() const override { return shape_.bytes_per_token; }

  Result<std::uint64_t> gather(const TokenRun& run, std::span<std::byte> chunk) const override {
    if (Result<void> ok = check_gather(layout_, shape_, run, chunk.size()); !ok) return std::move(ok).error();
    ChecksumStream checksum;
    std::byte* rows = chunk.data();
    const std::size_t head_bytes = run.num_tokens * row_bytes();
    for_each_head([&](const PlanePlan& plane, std::uint32_t head) {
      copy_head<Direction::kGather>(plane, head, run, rows);
      checksum.update({rows, head_bytes});  // while they are in this core's cache
      rows += head_bytes;
    });
    return checksum.digest();
  }

  Result<void> scatter(std::span<const std::byte> chunk, std::uint32_t chunk_tokens, std::uint32_t skip_tokens,
                       const TokenRun& run) const override {
    if (Result<void> ok = check_scatter(layout_, shape_, run, chunk.size(), chunk_tokens, skip_tokens); !ok) return ok;
    // CopyRows has one signature for both directions; the scattering ones only read through this pointer.
    std::byte* const first = const_cast<std::byte*>(chunk.data()) + skip_tokens * row_bytes();
    const std::size_t head_bytes = chunk_tokens * row_bytes();
    std::size_t row = 0;  // of K or V of a head of the chunk
    for_each_head([&](const PlanePlan& plane, std::uint32_t head) {
      const std::size_t copied_before = row / (std::size_t{shape_.num_heads} * layout_.planes);
      const std::size_t skipped =
          copied_before * (shape_.chunk_heads - shape_.num_heads) + shape_.first_in_chunk;  // heads of the chunk
      copy_head<Direction::kScatter>(plane, head, run, first + (row + skipped * layout_.planes) * head_bytes);
      ++row;
    });
    return {};
  }

 private:
  /// Of a chunk's row.
  std::size_t row_bytes() const { return std::size_t{layout_.head_dim} * shape_.chunk_element_bytes; }

  /// Calls visit(plane, head of those that are copied) in the order of canonical chunk bytes.
  template <class Visit>
  void for_each_head(Visit visit) const {
    for (std::size_t first = 0; first < planes_.size(); first += layout_.planes)
      for (std::uint32_t head = 0; head < shape_.num_heads; ++head)
        for (std::size_t plane = first; plane < first + layout_.planes; ++plane) visit(planes_[plane], head);
  }

  /// Copies one head's tokens of the run, block by block; `rows` is their first row in the chunk.
  template <Direction direction>
  void copy_head(const PlanePlan& plane, std::uint32_t head, const TokenRun& run, std::byte* rows) const {
    if (run.num_tokens == 0) return;  // it needs no block table either
    const PlaneLayout& strides = plane.strides;
    const std::vector<BlockId>& table = run.block_ids[plane.group];
    std::size_t block_index = run.first_token / layout_.block_tokens;
    std::uint32_t row_in_block = run.first_token % layout_.block_tokens;
    for (std::uint32_t left = run.num_tokens; left > 0; ++block_index, row_in_block = 0) {
      const std::uint32_t tokens = std::min(left, layout_.block_tokens - row_in_block);
      if (table[block_index] == kNoBlock) {
        copy_nothing<direction>(rows, tokens * row_bytes());
      } else {
        const std::int64_t offset = table[block_index] * strides.block_stride_bytes +
                                    (shape_.first_in_cache + head) * strides.head_stride_bytes +
                                    row_in_block * strides.token_stride_bytes;
        copy_tokens<direction>(plane, reinterpret_cast<std::byte*>(strides.base + static_cast<std::uint64_t>(offset)),
                               rows, tokens);
      }
      rows += tokens * row_bytes();
      left -= tokens;
    }
  }

  /// Some tokens of one block.
  template <Direction direction>
  void copy_tokens(const PlanePlan& plane, std::byte* cache, std::byte* rows, std::size_t tokens) const {
    constexpr bool gathers = direction == Direction::kGather;
    if (!shape_.converts)
      return (gathers ? plane.gather : plane.scatter)(plane.strides, cache, rows, tokens, row_bytes(),
                                                      layout_.element_bytes);
    const std::int64_t dim_stride = plane.strides.dim_stride_bytes;
    for (std::size_t t = 0; t < tokens; ++t, cache += plane.strides.token_stride_bytes, rows += row_bytes()) {
      if constexpr (gathers)
        convert_to_chunk(cache_type_, chunk_type_, cache, dim_stride, rows, layout_.head_dim, 1 / plane.scale);
      else
        convert_to_cache(cache_type_, chunk_type_, cache, dim_stride, rows, layout_.head_dim, plane.scale);
    }
  }

  const KvLayout layout_;
  const ElementType cache_type_, chunk_type_;
  const ChunkShape shape_;
  std::vector<PlanePlan> planes_;  // K, V, K, V, ... or one latent plane a layer
};

}  // namespace

Result<std::unique_ptr<Packer>> make_host_packer(KvLayout layout, ChunkFormat format) {
  if (Result<void> ok = check_layout(layout); !ok) return std::move(ok).error();
  const Result<ChunkShape> shape = resolve(layout, format);
  if (!shape) return shape.error();
  return std::unique_ptr<Packer>(std::make_unique<HostPacker>(std::move(layout), format, *shape));
}

}  // namespace kvferry
