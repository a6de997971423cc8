#include "tests/kernels/reference_packer.h"

#include <cstring>
#include <utility>

#include "kernels/chunk_shape.h"
#include "kernels/convert_rows.h"
#include "transport/base/checksum.h"

namespace kvferry {
namespace {

class ReferencePacker final : public Packer {
 public:
  ReferencePacker(KvLayout layout, ChunkFormat format, const ChunkShape& shape)
      : layout_(std::move(layout)), format_(std::move(format)), shape_(shape) {}
  const KvLayout& layout() const override { return layout_; }
  std::uint64_t chunk_bytes_per_token() const override { return shape_.bytes_per_token; }

  Result<std::uint64_t> gather(const TokenRun& run, std::span<std::byte> chunk) const override {
    KVFERRY_TRY(check_gather(layout_, shape_, run, chunk.size()));
    for_each_element(run, run.num_tokens, 0, [&](std::byte* cached, std::uint64_t offset, float scale) {
      std::byte* const kept = chunk.data() + offset;
      if (cached == nullptr)
        std::memset(kept, 0, shape_.chunk_element_bytes);
      else if (shape_.converts)
        convert_to_chunk(format_.cache_type, format_.chunk_type, cached, 0, kept, 1, 1 / scale);
      else
        std::memcpy(kept, cached, layout_.element_bytes);
    });
    return chunk_checksum(chunk.first(run.num_tokens * shape_.bytes_per_token));
  }

  Result<void> scatter(std::span<const std::byte> chunk, std::uint32_t chunk_tokens, std::uint32_t skip_tokens,
                       const TokenRun& run) const override {
    KVFERRY_TRY(check_scatter(layout_, shape_, run, chunk.size(), chunk_tokens, skip_tokens));
    for_each_element(run, chunk_tokens, skip_tokens, [&](std::byte* cached, std::uint64_t offset, float scale) {
      const std::byte* const kept = chunk.data() + offset;
      if (cached == nullptr) return;
      if (shape_.converts)
        convert_to_cache(format_.cache_type, format_.chunk_type, cached, 0, kept, 1, scale);
      else
        std::memcpy(cached, kept, layout_.element_bytes);
    });
    return {};
  }

 private:
  /// Calls visit(address in the cache or nullptr, offset in a chunk of chunk_tokens tokens, scale) for each element.
  template <class Visit>
  void for_each_element(const TokenRun& run, std::uint64_t chunk_tokens, std::uint64_t skip_tokens, Visit visit) const {
    for (std::uint64_t layer = 0; layer < layout_.layers.size(); ++layer)
      for (std::uint64_t head = 0; head < shape_.num_heads; ++head)
        for (std::uint64_t plane = 0; plane < layout_.planes; ++plane)
          for (std::uint64_t token = 0; token < run.num_tokens; ++token)
            for (std::uint64_t dim = 0; dim < layout_.head_dim; ++dim) {
              const std::uint64_t chunk_head = layer * shape_.chunk_heads + shape_.first_in_chunk + head;
              const std::uint64_t row = chunk_head * layout_.planes + plane;
              const std::uint64_t index = (row * chunk_tokens + skip_tokens + token) * layout_.head_dim + dim;
              const std::uint64_t scale = layer * layout_.planes + plane;
              visit(element(run, layer, shape_.first_in_cache + head, plane, run.first_token + token, dim),
                    index * shape_.chunk_element_bytes, format_.scales.empty() ? 1 : format_.scales[scale]);
            }
  }

  std::byte* element(const TokenRun& run, std::uint64_t layer_index, std::uint64_t head, std::uint64_t plane_index,
                     std::uint64_t token, std::uint64_t dim) const {
    const LayerLayout& layer = layout_.layers[layer_index];
    const PlaneLayout& plane = plane_index == 0 ? layer.key : layer.value;
    const BlockId block = run.block_ids[layer.group][token / layout_.block_tokens];
    if (block == kNoBlock) return nullptr;
    const std::int64_t offset = block * plane.block_stride_bytes +
                                static_cast<std::int64_t>(head) * plane.head_stride_bytes +
                                static_cast<std::int64_t>(token % layout_.block_tokens) * plane.token_stride_bytes +
                                static_cast<std::int64_t>(dim) * plane.dim_stride_bytes;
    return reinterpret_cast<std::byte*>(plane.base + static_cast<std::uint64_t>(offset));
  }

  const KvLayout layout_;
  const ChunkFormat format_;
  const ChunkShape shape_;
};

}  // namespace

Result<std::unique_ptr<Packer>> make_reference_packer(KvLayout layout, ChunkFormat format) {
  KVFERRY_TRY(check_layout(layout));
  const ChunkShape shape = KVFERRY_TRY(resolve(layout, format));
  return std::unique_ptr<Packer>(std::make_unique<ReferencePacker>(std::move(layout), std::move(format), shape));
}

}  // namespace kvferry
