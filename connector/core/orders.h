// What the controller orders for this node's pool: pin, unpin, evict and replicate chunks. An order is advisory: it
// cannot corrupt an answer, fill the pool with pinned chunks, or outlast its deadline.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "connector/core/chunk_pool.h"
#include "transport/base/ids.h"

namespace kvferry {

/// Pins those of `keys` that are in the pool, for at most `ttl`. Orders with the same id add up.
struct PinOrder {
  std::uint64_t id = 0;
  std::vector<ChunkKey> keys;
  TimeNs ttl = 0;
};

/// Copies these chunks from the node at `endpoint` into this pool, in this order, within `ttl`.
struct ReplicateOrder {
  EngineId engine_id;
  std::string endpoint;
  std::vector<ChunkMeta> chunks;  // num_tokens of full chunks is ignored
  TimeNs ttl = 0;
};

/// A ReplicateOrder in progress: one lease and one pull for each piece, one piece at a time.
struct Replication {
  EngineId engine_id;
  std::string endpoint;
  std::deque<ChunkMeta> remaining;
  TimeNs deadline = 0;
  std::vector<ChunkMeta> piece;  // the chunks requested now; empty if no request is in progress
  std::uint64_t fetch = 0;       // the piece's RequestLease::fetch
  std::uint64_t pull = 0;        // the piece's StartPull::pull; 0 until the lease is answered
  TimeNs try_deadline = 0;
};

}  // namespace kvferry
