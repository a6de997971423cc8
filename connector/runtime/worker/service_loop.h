// The worker's service thread: owns the socket of the scheduler node's orders and the transport's completions, and
// hands both to the part that they belong to: Puller, Pusher, SlotGrants or RunHasher.
#pragma once

#include <memory>
#include <string>

#include "connector/runtime/worker/pusher.h"
#include "connector/runtime/worker/worker_parts.h"
#include "transport/base/result.h"

namespace kvferry {

class ServiceLoop {
 public:
  /// Starts the thread. kUnavailable: no local socket.
  static Result<std::unique_ptr<ServiceLoop>> start(const WorkerParts& parts);
  ~ServiceLoop();
  /// Where the scheduler node sends its orders; reachable on this machine only.
  const std::string& endpoint() const;
  /// The part that the step thread reports its saves to.
  Pusher& pusher();
  /// Joins the thread; ending the transfers under way is up to the transport. Idempotent.
  void shutdown();

 private:
  struct Impl;
  explicit ServiceLoop(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry
