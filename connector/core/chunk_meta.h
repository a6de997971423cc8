// A chunk's metadata: its key, its size, and for which of its tokens it has KV.
#pragma once

#include <cstdint>
#include <optional>

#include "transport/base/chunk_key.h"

namespace kvferry {

struct ChunkMeta {
  ChunkKey key;
  std::uint32_t num_tokens = 0;
  bool is_tail = false;
  std::optional<ChunkKey> tail_group;
  std::uint32_t window_from = 0;  // layers with a sliding window have KV only from this token of the chunk on
};

}  // namespace kvferry
