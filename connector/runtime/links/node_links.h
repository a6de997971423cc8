// The scheduler node's thread: one loop over the controller, the other nodes and this engine's workers.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "connector/core/scheduler/scheduler_core.h"
#include "connector/runtime/links/node_wire.h"
#include "connector/runtime/links/zmq_link.h"
#include "controller/api/client.h"
#include "transport/base/clock.h"

namespace kvferry {

/// What the thread shares with the engine's calls: the core behind its lock. `changed` is told whenever something came
/// in that may turn a pending look-up into an answer.
struct SharedCore {
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::optional<SchedulerCore> core;  // there once the workers are attached
  /// Chunks that the workers were told to save, and how many of these have not reported it yet: a GPU's saves end in a
  /// later step.
  std::map<ChunkRef, std::uint32_t> saves;
};

class NodeLinks {
 public:
  NodeLinks(SharedCore& shared, std::unique_ptr<controller::Client> directory, std::unique_ptr<ServerSocket> peers);
  ~NodeLinks();

  /// Connects to the workers and starts the thread.
  Result<void> start(const std::vector<WorkerHello>& workers);
  /// Leaves what take_actions() gives to the thread; call it with the lock held after each event. True: somebody waits
  /// for it and the thread may be asleep, so wake() follows, best without the lock, for which it would only wait. To
  /// wake a thread may take the engine's own thread longer than a whole step's plan: news for the controller lie until
  /// the thread's next turn, which comes within 2 ms while requests are served,
  /// else within 20 ms.
  bool leave(std::vector<Action> actions);
  void wake();
  /// Leaves the controller, joins the thread. Idempotent.
  void shutdown();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry
