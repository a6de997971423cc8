// The scheduler node's thread: one loop over the controller, the other nodes and this engine's workers.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "connector/core/scheduler/scheduler_core.h"
#include "connector/runtime/links/node_wire.h"
#include "connector/runtime/links/zmq_link.h"
#include "controller/api/client.h"

namespace kvferry {

/// What the thread shares with the engine's calls: the core behind its lock.
struct SharedCore {
  mutable std::mutex mutex;
  std::condition_variable changed;    // notified after each event that may answer a pending lookup
  std::optional<SchedulerCore> core;  // empty until the workers are attached
  /// How many workers have not yet reported the save of a chunk. A GPU reports its saves in a later step.
  std::map<ChunkRef, std::uint32_t> saves;
};

class NodeLinks {
 public:
  NodeLinks(SharedCore& shared, std::unique_ptr<controller::Client> directory, std::unique_ptr<ServerSocket> server);
  ~NodeLinks();

  /// Connects to the workers and starts the thread.
  Result<void> start(const std::vector<WorkerHello>& workers);
  /// Queues the core's actions for the thread; call it with the lock held after each event. Returns true if the caller
  /// should call wake(), best after it has released the lock, because an action is urgent and the thread may be asleep.
  /// Waking the thread may cost the engine's own thread more than a whole step's plan, so actions for the controller
  /// wait for the thread's next turn, at most 2 ms while there are requests and at most 20 ms otherwise.
  bool enqueue(std::vector<Action> actions);
  void wake();
  /// Leaves the controller and joins the thread. Idempotent.
  void shutdown();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry
