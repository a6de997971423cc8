// The KV blocks of real models, from their published configurations: what one rank's blocks look like in an engine that
// keeps K and V of each layer apart (vLLM's default layouts), or one latent a layer (MLA).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "transport/base/result.h"

namespace kvferry::bench {

constexpr std::uint32_t kBlockTokens = 16;

struct ModelShape {
  std::string_view name;
  std::uint32_t layers;
  std::uint32_t kv_heads;   // 0: MLA
  std::uint32_t head_size;  // MLA: of the latent and its rotary part together
};

struct ModelBlocks {
  std::uint64_t block_bytes;  // one block of one layer: K or V, or the latent
  std::uint64_t num_blocks;   // of all layers, for all tokens
  std::string derivation;     // one line for people
};

/// kInvalidArgument: names the ones that are known.
Result<ModelShape> find_model(std::string_view name);

/// dtype: "bf16" or "fp8". tokens: of one request. tp: tensor-parallel ranks, which share the KV heads out; MLA's
/// latent is the same on each. kInvalidArgument: bad dtype, no tokens, or tp doesn't divide the heads.
Result<ModelBlocks> blocks_of(const ModelShape& model, std::string_view dtype, std::uint64_t tokens, std::uint64_t tp);

}  // namespace kvferry::bench
