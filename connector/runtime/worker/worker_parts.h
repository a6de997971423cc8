// What the parts of a worker's service loop share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <string>

#include "connector/core/worker_core.h"
#include "connector/runtime/store/chunk_store.h"
#include "transport/base/clock.h"
#include "transport/transport.h"

namespace kvferry {

/// All of it outlives the parts.
struct WorkerParts {
  Transport& transport;
  ChunkStore& store;
  std::mutex& core_mutex;  // guards `core`, which the service thread shares with the step thread
  WorkerCore& core;
  const Clock& clock;
  std::span<const std::byte> pool;  // all slots
  RegionId pool_region;
  std::uint64_t slot_bytes = 0;
  std::uint64_t bytes_per_token = 0;
  std::uint32_t num_layers = 1;

  std::span<const std::byte> chunk_bytes(ChunkRef chunk, std::uint32_t num_tokens) const {
    return pool.subspan(chunk.slot * slot_bytes, num_tokens * bytes_per_token);
  }
  bool is_readable(ChunkRef chunk) const {
    const std::lock_guard lock(core_mutex);
    return core.readable(chunk);
  }
};

/// Sends a sealed outcome to the scheduler node.
using SendOutcome = std::function<void(const std::string& bytes)>;

}  // namespace kvferry
