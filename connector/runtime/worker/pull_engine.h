// The worker's pull thread: takes PullOrders from the scheduler node, moves the bytes, verifies them, answers.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "connector/core/worker_core.h"
#include "connector/runtime/store/chunk_store.h"
#include "connector/runtime/worker/push_engine.h"
#include "transport/base/result.h"
#include "transport/transport.h"

namespace kvferry {

/// What the engine works on; all of it outlives the engine.
struct PullEngineParts {
  Transport& transport;
  ChunkStore& store;
  std::uint64_t chunk_bytes = 0;  // of a slot
  std::uint64_t bytes_per_token = 0;
  std::mutex& core_mutex;
  WorkerCore& core;
  PushEngine& pushes;                    // shares the thread, its socket and the transport's completions
  std::span<const std::byte> pool = {};  // all slots
};

class PullEngine {
 public:
  /// Starts the thread. kUnavailable: no local socket.
  static Result<std::unique_ptr<PullEngine>> start(PullEngineParts parts);
  ~PullEngine();
  /// Where the scheduler node sends its orders; this machine only.
  const std::string& endpoint() const;
  /// Joins the thread; transfers under way are the transport's to end. Idempotent.
  void shutdown();

 private:
  struct Impl;
  explicit PullEngine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry
