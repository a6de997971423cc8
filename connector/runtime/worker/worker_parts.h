// The objects that the parts of a worker's service loop share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "connector/core/worker_core.h"
#include "connector/runtime/store/chunk_store.h"
#include "transport/base/clock.h"
#include "transport/transport.h"

namespace kvferry {

/// The worker core, which the service thread shares with the engine's worker thread.
class SharedWorkerCore {
 public:
  SharedWorkerCore(std::uint32_t rank, std::uint32_t num_slots) : core_(rank, num_slots) {}

  std::uint32_t rank() const { return core_.rank(); }
  /// Calls `call` with the core, under the core's lock.
  template <class Call>
  auto locked(Call call) {
    const std::lock_guard lock(mutex_);
    return call(core_);
  }
  bool loadable(ChunkRef chunk) {
    return locked([&](const WorkerCore& core) { return core.loadable(chunk); });
  }
  bool readable(ChunkRef chunk) {
    return locked([&](const WorkerCore& core) { return core.readable(chunk); });
  }

 private:
  std::mutex mutex_;
  WorkerCore core_;
};

/// The arguments that each part of the service loop receives. All referenced objects and the pool outlive the service
/// loop.
struct WorkerParts {
  Transport& transport;
  ChunkStore& store;
  SharedWorkerCore& core;
  const Clock& clock;
  std::span<std::byte> pool;  // memory of all slots
  RegionId pool_region;
  std::uint64_t slot_bytes = 0;
  std::uint64_t bytes_per_token = 0;
  std::vector<std::uint64_t> layer_bytes;  // [layer] number of bytes of a token, in the order of the chunk
  std::uint32_t layer_groups = 0;          // ConnectorConfig::push_layers

  struct ByteRange {
    std::uint64_t offset = 0, bytes = 0;
  };
  /// Returns the bytes of layers [first, end) in a chunk.
  ByteRange layers(std::uint32_t num_tokens, std::uint32_t first, std::uint32_t end) const {
    const auto begin = layer_bytes.begin();
    return {num_tokens * std::accumulate(begin, begin + first, std::uint64_t{0}),
            num_tokens * std::accumulate(begin + first, begin + end, std::uint64_t{0})};
  }
  /// Returns true if the pool has this slot and a chunk of that many tokens fits into the slot.
  bool fits(ChunkRef chunk, std::uint32_t num_tokens) const {
    return num_tokens * bytes_per_token <= slot_bytes && chunk.slot < pool.size() / slot_bytes;
  }
  /// Returns true if a chunk of that many tokens can be divided into so many cells; 0 stands for no cells.
  bool divides(std::uint32_t num_tokens, std::uint64_t num_cells) const {
    return num_cells == 0 || num_tokens * bytes_per_token % num_cells == 0;
  }
  std::span<std::byte> chunk_bytes(ChunkRef chunk, std::uint32_t num_tokens) const {
    return pool.subspan(chunk.slot * slot_bytes, num_tokens * bytes_per_token);
  }
  /// Clears what no run fills of a chunk that is about to be pulled, such as the padding of states, so that nothing is
  /// left of the slot's former content.
  void clear_gaps(ChunkRef to, std::uint32_t num_tokens, std::span<const ShardRun> runs,
                  std::uint64_t num_cells) const {
    const std::span<std::byte> chunk = chunk_bytes(to, num_tokens);
    const std::uint64_t cell_bytes = chunk.size() / num_cells;
    std::uint64_t done = 0;  // the runs are in the order of the chunk
    const auto clear_until = [&](std::uint64_t cell) {
      if (cell > done) std::ranges::fill(chunk.subspan(done * cell_bytes, (cell - done) * cell_bytes), std::byte{0});
    };
    for (const ShardRun& run : runs) {
      clear_until(run.target);
      done = std::max(done, run.target + run.cells);
    }
    clear_until(num_cells);
  }
};

/// Sends an outcome to the scheduler node. `bytes` is the outcome's envelope, made by seal().
using SendOutcome = std::function<void(const std::string& bytes)>;

}  // namespace kvferry
