// A chunk's metadata: its key, its number of tokens, and for which of these tokens it has KV.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "connector/core/tenant_id.h"
#include "transport/base/chunk_key.h"

namespace kvferry {

struct ChunkMeta {
  ChunkKey key;
  std::uint32_t num_tokens = 0;
  bool is_tail = false;  // true if the chunk has fewer tokens than a full chunk
  /// Key of the group of tails that have the same predecessor and the same first kTailGroupTokens tokens (chunk_key.h),
  /// with the same multimodal items in these tokens. Set only for tails of at least kTailGroupTokens tokens.
  std::optional<ChunkKey> tail_group;
  std::uint32_t window_from = 0;  // layers with a window may lack KV of the chunk's first `window_from` tokens
  TenantId tenant = 0;            // tenant whose requests can use the chunk
  /// [KV group] The chunk's first token that has KV in the group. `window_from` is the largest of these numbers. Empty
  /// in models whose KV groups with windows are all equal (KvGroup).
  std::vector<std::uint32_t> windows_from = {};

  /// Returns the first token of the chunk for which this KV group, which has a window, has KV.
  std::uint32_t from(std::size_t group) const { return windows_from.empty() ? window_from : windows_from[group]; }
  /// Sets the windows that another node sent. Returns false if a chunk of this length, of a model with `num_groups` KV
  /// groups, can't have them.
  bool set_windows(std::uint32_t from, const std::vector<std::uint32_t>& by_group, std::size_t num_groups) {
    window_from = from;
    windows_from = by_group;
    return from <= num_tokens && (by_group.empty() || by_group.size() == num_groups) &&
           std::ranges::all_of(by_group, [&](std::uint32_t each) { return each <= from; });
  }
  /// Returns true if num_tokens is possible for a full chunk or a tail. Does not check that `key` was computed from
  /// that many tokens: only a request that has the tokens can check that.
  bool has_possible_length(std::uint32_t chunk_tokens) const {
    return is_tail ? num_tokens > 0 && num_tokens < chunk_tokens : num_tokens == chunk_tokens;
  }
};

}  // namespace kvferry
