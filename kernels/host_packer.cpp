#include <algorithm>
#include <utility>

#include "kernels/chunk_shape.h"
#include "kernels/convert_rows.h"
#include "kernels/copy_rows.h"
#include "kernels/host_stream.h"
#include "kernels/packer.h"
#include "kernels/segment_hashes.h"
#include "transport/base/checksum.h"

namespace kvferry {
namespace {

class HostPacker final : public Packer {
 public:
  HostPacker(KvLayout layout, ChunkFormat format, const ChunkShape& shape)
      : layout_(std::move(layout)), format_(std::move(format)), shape_(shape) {
    const auto add = [&](const LayerLayout& layer, const PlaneLayout& plane) {
      planes_.push_back({plane, layer.group, format_.scales.empty() ? 1 : format_.scales[planes_.size()],
                         pick_copy<CopyDirection::kGather>(layout_, plane),
                         pick_copy<CopyDirection::kScatter>(layout_, plane)});
    };
    for (const LayerLayout& layer : layout_.layers) {
      add(layer, layer.key);
      if (layout_.planes == 2) add(layer, layer.value);
    }
  }
  const KvLayout& layout() const override { return layout_; }
  std::uint64_t chunk_bytes_per_token() const override { return shape_.bytes_per_token; }

  Result<std::uint64_t> gather(const TokenRun& run, std::span<std::byte> chunk) const override {
    const ChecksumStream checksum = KVFERRY_TRY(gather_hashed(run, chunk));
    return checksum.digest();
  }

  Result<std::uint64_t> gather_part(const TokenRun& run, std::span<std::byte> chunk,
                                    ChecksumStream& whole) const override {
    const ChecksumStream checksum = KVFERRY_TRY(gather_hashed(run, chunk));
    whole.update_hashed(chunk.first(run.num_tokens * shape_.bytes_per_token), checksum);
    return checksum.digest();
  }

  Result<void> scatter(std::span<const std::byte> chunk, std::uint32_t chunk_tokens, std::uint32_t skip_tokens,
                       const TokenRun& run) const override {
    return scatter(chunk, chunk_tokens, skip_tokens, run, nullptr);
  }

  Result<std::uint64_t> scatter_and_hash(std::span<const std::byte> chunk, std::uint32_t chunk_tokens,
                                         std::uint32_t skip_tokens, const TokenRun& run) const override {
    const std::uint64_t num_bytes = chunk_tokens * shape_.bytes_per_token;
    SegmentHashes hashes(chunk.first(std::min<std::uint64_t>(chunk.size(), num_bytes)));
    KVFERRY_TRY(scatter(chunk, chunk_tokens, skip_tokens, run, &hashes));
    return hashes.checksum();
  }

 private:
  Result<ChecksumStream> gather_hashed(const TokenRun& run, std::span<std::byte> chunk) const {
    KVFERRY_TRY(check_gather(layout_, shape_, run, chunk.size()));
    ChecksumStream checksum;
    if (const HostStream stream = streamed(); stream.suits_gather(run)) {
      checksum.update_hashed(stream.gather(run, chunk.data()));
      return checksum;
    }
    std::byte* rows = chunk.data();
    const std::size_t head_bytes = run.num_tokens * row_bytes();
    for_each_head([&](const PlanePlan& plane, std::uint32_t head) {
      copy_head<CopyDirection::kGather>(plane, head, run, rows);
      checksum.update({rows, head_bytes});  // the rows are hashed while they are in this core's CPU cache
      rows += head_bytes;
    });
    return checksum;
  }

  /// Copies the rows to the KV blocks. Unless `hashes` is nullptr, adds rows to it just before they are copied, so that
  /// the copy finds them in this core's CPU cache.
  Result<void> scatter(std::span<const std::byte> chunk, std::uint32_t chunk_tokens, std::uint32_t skip_tokens,
                       const TokenRun& run, SegmentHashes* hashes) const {
    KVFERRY_TRY(check_scatter(layout_, shape_, run, chunk.size(), chunk_tokens, skip_tokens));
    if (const HostStream stream = streamed(); stream.suits_scatter(run)) {
      stream.scatter(chunk.data(), chunk_tokens, skip_tokens, run, hashes);
      return {};
    }
    // CopyRows has one signature for both directions; functions that scatter only read through this pointer.
    std::byte* const first = const_cast<std::byte*>(chunk.data()) + skip_tokens * row_bytes();
    const std::size_t head_bytes = chunk_tokens * row_bytes();
    std::size_t row = 0;  // number of combinations (layer, head, K or V) copied so far
    for_each_head([&](const PlanePlan& plane, std::uint32_t head) {
      const std::size_t copied_before = row / (std::size_t{shape_.num_heads} * layout_.planes);
      // Number of pairs (layer, head) that precede the current pair in the chunk and are not copied.
      const std::size_t skipped = copied_before * (shape_.chunk_heads - shape_.num_heads) + shape_.first_in_chunk;
      std::byte* const rows = first + (row + skipped * layout_.planes) * head_bytes;
      if (hashes != nullptr) hashes->add({rows, run.num_tokens * row_bytes()});
      copy_head<CopyDirection::kScatter>(plane, head, run, rows);
      ++row;
    });
    return {};
  }

  HostStream streamed() const { return {layout_, format_.cache_type, format_.chunk_type, shape_, planes_}; }
  std::size_t row_bytes() const { return std::size_t{layout_.head_dim} * shape_.chunk_element_bytes; }

  /// Calls visit(plane, index of the copied head) in the order of canonical chunk bytes.
  template <class Visit>
  void for_each_head(Visit visit) const {
    for (std::size_t first = 0; first < planes_.size(); first += layout_.planes)
      for (std::uint32_t head = 0; head < shape_.num_heads; ++head)
        for (std::size_t plane = first; plane < first + layout_.planes; ++plane) visit(planes_[plane], head);
  }

  /// Copies one head's tokens of the run, block by block; `rows` is the address of their first row in the chunk.
  template <CopyDirection direction>
  void copy_head(const PlanePlan& plane, std::uint32_t head, const TokenRun& run, std::byte* rows) const {
    if (run.num_tokens == 0) return;  // an empty run may have no block table
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

  /// Copies tokens that lie in one block.
  template <CopyDirection direction>
  void copy_tokens(const PlanePlan& plane, std::byte* cache, std::byte* rows, std::size_t tokens) const {
    constexpr bool gathers = direction == CopyDirection::kGather;
    if (!shape_.converts)
      return (gathers ? plane.gather : plane.scatter)(plane.strides, cache, rows, tokens, row_bytes(),
                                                      layout_.element_bytes);
    const std::int64_t dim_stride = plane.strides.dim_stride_bytes;
    for (std::size_t t = 0; t < tokens; ++t, cache += plane.strides.token_stride_bytes, rows += row_bytes()) {
      if constexpr (gathers)
        convert_to_chunk(format_.cache_type, format_.chunk_type, cache, dim_stride, rows, layout_.head_dim,
                         1 / plane.scale);
      else
        convert_to_cache(format_.cache_type, format_.chunk_type, cache, dim_stride, rows, layout_.head_dim,
                         plane.scale);
    }
  }

  const KvLayout layout_;
  const ChunkFormat format_;
  const ChunkShape shape_;
  std::vector<PlanePlan> planes_;  // K, V, K, V, ... or one latent plane for each layer
};

}  // namespace

Result<std::unique_ptr<Packer>> make_host_packer(KvLayout layout, ChunkFormat format) {
  KVFERRY_TRY(check_layout(layout));
  const ChunkShape shape = KVFERRY_TRY(resolve(layout, format));
  return std::unique_ptr<Packer>(std::make_unique<HostPacker>(std::move(layout), std::move(format), shape));
}

}  // namespace kvferry
