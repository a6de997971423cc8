// What the scheduler core reports for the engine's KV events: which chunks were added to its pool or removed, and which
// tokens a chunk has.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/base/chunk_key.h"

namespace kvferry {

/// The state of a chunk in the pool. If is_ready and is_writing are both false, the pool does not have the chunk.
struct PoolChange {
  ChunkKey key;
  bool is_ready = false;    // true if the pool has the chunk
  bool is_writing = false;  // true if the chunk is being written into the pool
};

struct PoolChanges {
  bool is_all = false;  // true if `chunks` are all chunks of the pool, because earlier changes were dropped
  std::vector<PoolChange> chunks;
};

/// Says that the chunk `key` has num_tokens tokens of the request, from first_token on.
struct NamedChunk {
  std::string request_id;
  ChunkKey key;
  std::uint32_t first_token = 0;
  std::uint32_t num_tokens = 0;
};

}  // namespace kvferry
