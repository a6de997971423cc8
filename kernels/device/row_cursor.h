// Walks a job's rows. A row has the head_dim elements of one token, for one head of K, V or the latent of one layer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/pack_plan.h"

namespace kvferry::device {

class RowCursor {
 public:
  /// Starts at byte `offset` of the job's run (the bytes that the job copies, see PackJob). `offset` must be less than
  /// the run's size.
  KVFERRY_DEVICE RowCursor(const PackPlan& plan, const PackJob& job, std::uint64_t offset) : plan_(plan), job_(job) {
    const std::uint32_t row_bytes = plan.row_bytes();
    std::uint64_t row = offset / row_bytes;
    column_ = static_cast<std::uint32_t>(offset - row * row_bytes);
    const std::uint64_t head_plane = row / job.num_tokens;
    token_ = static_cast<std::uint32_t>(row - head_plane * job.num_tokens);
    const std::uint32_t head_planes = plan.num_heads * plan.planes_per_layer;
    layer_ = static_cast<std::uint32_t>(head_plane / head_planes);
    const auto rest = static_cast<std::uint32_t>(head_plane - std::uint64_t{layer_} * head_planes);
    head_ = rest / plan.planes_per_layer;
    plane_ = rest % plan.planes_per_layer;
    locate();
  }

  /// Moves the cursor on by num_bytes. Once it has reached or passed the end of the run, the functions below must not
  /// be called.
  KVFERRY_DEVICE void advance(std::uint32_t num_bytes) {
    column_ += num_bytes;
    if (column_ < plan_.row_bytes()) return;
    do {
      column_ -= plan_.row_bytes();
      if (++token_ < job_.num_tokens) continue;
      token_ = 0;
      if (++plane_ < plan_.planes_per_layer) continue;
      plane_ = 0;
      if (++head_ < plan_.num_heads) continue;
      head_ = 0;
      ++layer_;
    } while (column_ >= plan_.row_bytes());
    if (layer_ < plan_.num_layers) locate();
  }

  /// Returns the position within the row of the chunk, in bytes.
  KVFERRY_DEVICE std::uint32_t column() const { return column_; }
  KVFERRY_DEVICE std::byte* in_chunk() const { return chunk_row_ + column_; }
  /// Returns the address of the row's first element in the cache, or nullptr if the block's id is -1.
  KVFERRY_DEVICE std::byte* cache_row() const { return cache_row_; }
  KVFERRY_DEVICE const PlaneView& view() const { return plan_.planes[layer_ * plan_.planes_per_layer + plane_]; }

 private:
  KVFERRY_DEVICE void locate() {
    const PlaneView& plane = view();
    const std::uint32_t position = job_.first_token + token_;
    const std::uint32_t block_index = position / plan_.block_tokens;
    const std::int32_t block = job_.tables[plane.group * job_.table_blocks + block_index];
    const std::int64_t offset = block * plane.block_stride_bytes +
                                std::int64_t{plan_.first_in_cache + head_} * plane.head_stride_bytes +
                                std::int64_t{position - block_index * plan_.block_tokens} * plane.token_stride_bytes;
    cache_row_ = block < 0 ? nullptr : reinterpret_cast<std::byte*>(plane.base + static_cast<std::uint64_t>(offset));
    const std::uint64_t row =
        (std::uint64_t{layer_} * plan_.chunk_heads + plan_.first_in_chunk + head_) * plan_.planes_per_layer + plane_;
    chunk_row_ = job_.chunk + (row * job_.chunk_tokens + job_.skip_tokens + token_) * plan_.row_bytes();
  }

  const PackPlan& plan_;
  const PackJob& job_;
  std::uint32_t layer_, head_, plane_, token_, column_;
  std::byte* cache_row_ = nullptr;
  std::byte* chunk_row_ = nullptr;
};

}  // namespace kvferry::device
