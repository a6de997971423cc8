// A chunk's metadata: its key, its number of tokens, and for which of these tokens it has KV.
#pragma once

#include <cstdint>
#include <optional>

#include "connector/core/tenant_id.h"
#include "transport/base/chunk_key.h"

namespace kvferry {

struct ChunkMeta {
  ChunkKey key;
  std::uint32_t num_tokens = 0;
  bool is_tail = false;
  std::optional<ChunkKey> tail_group;  // set for tails of at least kTailGroupTokens tokens (chunk_key.h)
  std::uint32_t window_from = 0;       // the layers with a sliding window have KV only from this token of the chunk on
  TenantId tenant = 0;                 // whose requests can use the chunk

  /// Returns true if num_tokens is possible for a full chunk or a tail. Does not check that `key` was computed from
  /// that many tokens: only a request that has the tokens can check that.
  bool has_possible_length(std::uint32_t chunk_tokens) const {
    return is_tail ? num_tokens > 0 && num_tokens < chunk_tokens : num_tokens == chunk_tokens;
  }
};

}  // namespace kvferry
