// The KV blocks that one rank of a real model holds, from the model's published configuration. K and V of each layer
// count as separate blocks; MLA has one latent per layer.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "transport/base/result.h"

namespace kvferry::bench {

constexpr std::uint32_t kBlockTokens = 16;
constexpr std::uint64_t kTokensMax = 16 << 20;

struct ModelShape {
  std::string_view name;
  std::uint32_t layers;
  std::uint32_t kv_heads;   // number of KV heads; 0 for MLA
  std::uint32_t head_size;  // size of a head; for MLA, the sizes of the latent and of its rotary part together
};

struct ModelBlocks {
  std::uint64_t block_bytes;  // number of bytes in a block of K, of V or of the latent in one layer
  std::uint64_t num_blocks;   // number of blocks in all layers, for all tokens
  std::string derivation;     // one line that shows how the numbers follow from the model
};

/// Returns the shape of a known model. Errors: kInvalidArgument if the model is unknown; the error message lists the
/// known models.
Result<ModelShape> find_model(std::string_view name);

/// Returns the blocks that one request takes on one rank. `dtype` is "bf16" or "fp8", `tokens` is the request's length
/// in tokens, and `tp` is the number of tensor-parallel ranks, which share the KV heads; with MLA, each rank has the
/// whole latent. Errors: kInvalidArgument if a value is not allowed.
Result<ModelBlocks> blocks_of(const ModelShape& model, std::string_view dtype, std::uint64_t tokens, std::uint64_t tp);

}  // namespace kvferry::bench
