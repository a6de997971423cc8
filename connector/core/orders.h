// What the controller asks of this node's pool: chunks to keep, to forget and to bring from another node. All of it is
// a wish: it can't make a wrong token, fill the pool with held chunks, or hold anything beyond its deadline.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "connector/core/chunk_pool.h"
#include "transport/base/ids.h"

namespace kvferry {

/// Keep those of `keys` that are here, for up to `ttl`. Several may carry the same number: they add up.
struct PinOrder {
  std::uint64_t id = 0;
  std::vector<ChunkKey> keys;
  TimeNs ttl = 0;
};

/// Bring these from the node at `endpoint`, in this order, for up to `ttl`.
struct ReplicateOrder {
  EngineId engine_id;
  std::string endpoint;
  std::vector<ChunkMeta> chunks;  // num_tokens of full ones is not looked at
  TimeNs ttl = 0;
};

/// A ReplicateOrder that is being carried out, a piece at a time: one lease, one pull, the next piece.
struct Replication {
  EngineId engine_id;
  std::string endpoint;
  std::deque<ChunkMeta> remaining;
  TimeNs deadline = 0;
  std::vector<ChunkMeta> piece;  // asked for; empty: nothing is under way
  std::uint64_t fetch = 0;       // number of the piece's lease wish
  std::uint64_t pull = 0;        // of its pull; 0: the lease is not answered yet
  TimeNs try_deadline = 0;
};

}  // namespace kvferry
