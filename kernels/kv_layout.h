// Layout of one rank's paged KV cache in memory, as strides; nothing is derived from tensor shapes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "transport/base/result.h"

namespace kvferry {

/// A plane is K, V or the latent of one layer. Its element (block, head, token, dim) lies at base + block *
/// block_stride_bytes + head * head_stride_bytes + token * token_stride_bytes + dim * dim_stride_bytes.
struct PlaneLayout {
  std::uint64_t base = 0;  // address of element (0, 0, 0, 0)
  std::int64_t block_stride_bytes = 0;
  std::int64_t head_stride_bytes = 0;
  std::int64_t token_stride_bytes = 0;
  // Equals element_bytes if the elements of a token's row are contiguous. In a transposed K, which vLLM's CPU attention
  // may have, they are not.
  std::int64_t dim_stride_bytes = 0;
};

/// One attention layer of one rank. A layer of MLA has one plane, the latent (planes == 1). It is `key` and has
/// one head; `value` is unused.
struct LayerLayout {
  std::string name;         // vLLM's layer name
  std::uint32_t group = 0;  // KV cache group, which determines the block table of this layer
  PlaneLayout key;
  PlaneLayout value;
};

/// The layers of one rank's cache that have one shape. Canonical chunk bytes are [layer][kv_head][k or
/// v][token][head_dim], tightly packed for the chunk's own number of tokens, so a chunk of t tokens with the cache's
/// heads and element type has t * bytes_per_token() bytes.
struct KvLayout {
  std::vector<LayerLayout> layers;
  std::uint32_t num_kv_heads = 0;  // heads on this rank
  std::uint32_t head_dim = 0;      // number of elements in a token's row
  std::uint32_t element_bytes = 0;
  std::uint32_t planes = 2;        // 2: K and V; 1: a latent cache
  std::uint32_t block_tokens = 0;  // tokens in a block
  std::uint32_t num_blocks = 0;    // valid block ids are [0, num_blocks)

  std::uint64_t bytes_per_token() const {
    return std::uint64_t{num_kv_heads} * head_dim * element_bytes * planes * layers.size();
  }
  /// Returns kInvalidArgument if there are no layers, a size is 0, `planes` is not 1 or 2, or a layer has no address.
  Result<void> validate() const;
};

/// Returns the bytes of a token in all layers of a rank. A rank whose layers differ in shape has several layouts, and
/// its chunk has the bytes of each, one after the other.
inline std::uint64_t bytes_per_token(std::span<const KvLayout> layouts) {
  std::uint64_t bytes = 0;
  for (const KvLayout& layout : layouts) bytes += layout.bytes_per_token();
  return bytes;
}

}  // namespace kvferry
