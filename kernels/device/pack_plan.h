// What a launch is told: plain data that lies in GPU memory or in a kernel's arguments.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/portable.h"

namespace kvferry::device {

/// K or V of one layer: PlaneLayout, with its KV group and scale.
struct PlaneView {
  std::uint64_t base;
  std::int64_t block_stride_bytes, head_stride_bytes, token_stride_bytes, dim_stride_bytes;
  std::uint32_t group;
  float scale, inverse_scale;
};

/// The cache and the format of its chunks; the same for all jobs of a packer.
struct PackPlan {
  const PlaneView* planes;  // [layer][K or V]
  std::uint32_t num_layers, planes_per_layer, block_tokens, head_dim;
  std::uint32_t num_heads;                       // that are copied
  std::uint32_t first_in_cache, first_in_chunk;  // the first of them
  std::uint32_t chunk_heads;                     // of a chunk, copied or not
  std::uint32_t cache_element_bytes, chunk_element_bytes;

  KVFERRY_DEVICE std::uint32_t row_bytes() const { return head_dim * chunk_element_bytes; }
  /// Of a layer of `num_tokens` tokens, as far as it is copied.
  KVFERRY_DEVICE std::uint64_t layer_bytes(std::uint32_t num_tokens) const {
    return std::uint64_t{num_heads} * planes_per_layer * num_tokens * row_bytes();
  }
};

/// Some tokens of one chunk. What is copied of it, in canonical order and tightly packed, is its *run*: for a gather
/// the whole chunk, for a scatter perhaps a part.
struct PackJob {
  std::byte* chunk;
  const std::int32_t* tables;  // [group][block of the sequence], -1 for a block that there is not
  std::uint32_t table_blocks;  // of each group
  std::uint32_t first_token;   // of the sequence
  std::uint32_t num_tokens;
  std::uint32_t chunk_tokens, skip_tokens;
  std::uint64_t* segments;  // for the XXH3 of each checksum segment of the run; nullptr: not wanted
};

/// Layers [first, end), those before first being done.
struct LayerRange {
  std::uint32_t first, end;
};

}  // namespace kvferry::device
