// Arguments of a launch, as plain data that a kernel can read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/portable.h"

namespace kvferry::device {

/// PlaneLayout of K, V or the latent of one layer, with its KV group and scale.
struct PlaneView {
  std::uint64_t base;
  std::int64_t block_stride_bytes, head_stride_bytes, token_stride_bytes, dim_stride_bytes;
  std::uint32_t group;
  float scale, inverse_scale;
};

/// Layout of the cache and of its chunks; the same for all jobs of a packer.
struct PackPlan {
  const PlaneView* planes;  // each layer's K, then its V, or its latent alone
  std::uint32_t num_layers, planes_per_layer, block_tokens, head_dim;
  std::uint32_t num_heads;  // number of copied heads
  // Index of the first copied head, among the cache's heads and among the chunk's.
  std::uint32_t first_in_cache, first_in_chunk;
  std::uint32_t chunk_heads;  // number of the chunk's heads, copied or not
  std::uint32_t cache_element_bytes, chunk_element_bytes;

  KVFERRY_DEVICE std::uint32_t row_bytes() const { return head_dim * chunk_element_bytes; }
  /// Returns the number of bytes that the copied heads of `num_tokens` tokens have in one layer.
  KVFERRY_DEVICE std::uint64_t layer_bytes(std::uint32_t num_tokens) const {
    return std::uint64_t{num_heads} * planes_per_layer * num_tokens * row_bytes();
  }
};

/// Tokens of one chunk to copy. The job's *run* is the copied bytes in canonical order, tightly packed: the whole chunk
/// for a gather, possibly a part for a scatter.
struct PackJob {
  std::byte* chunk;
  const std::int32_t* tables;  // ids of consecutive blocks of the sequence, group by group; -1: no block
  std::uint32_t table_blocks;  // number of blocks in the table of each group
  std::uint32_t first_token;   // position of the first token, counted from the start of the first block in the tables
  std::uint32_t num_tokens;
  // Number of tokens in the chunk, and of tokens at its start that are not copied.
  std::uint32_t chunk_tokens, skip_tokens;
  // Where a copy kernel that also hashes writes the XXH3 of each checksum segment of the run; nullptr: nowhere.
  std::uint64_t* segments;
};

/// Layers [first, end). The layers before `first` are already copied.
struct LayerRange {
  std::uint32_t first, end;
};

}  // namespace kvferry::device
