// The worker's service thread: receives the scheduler node's orders and the transport's completions, and passes each to
// Puller, Pusher, SlotGrants, RunHasher or the chunk store.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "connector/runtime/links/zmq_link.h"
#include "connector/runtime/poll_loop.h"
#include "connector/runtime/worker/puller.h"
#include "connector/runtime/worker/pusher.h"
#include "connector/runtime/worker/run_hasher.h"
#include "connector/runtime/worker/slot_grants.h"

namespace kvferry {

class ServiceLoop {
 public:
  /// Starts the thread. Errors: kUnavailable if no local socket can be opened.
  static Result<std::unique_ptr<ServiceLoop>> start(const WorkerParts& parts);
  /// The endpoint to which the scheduler node sends its orders; reachable on this machine only.
  const std::string& endpoint() const { return socket_->endpoint(); }
  /// Returns the part to which the engine's worker thread reports its saves.
  Pusher& pusher() { return pusher_; }
  /// Joins the thread. Running transfers go on until the transport is shut down. A second call does nothing.
  void shutdown() { loop_.stop(); }

 private:
  ServiceLoop(const WorkerParts& parts, std::unique_ptr<ServerSocket> socket)
      : parts_(parts), socket_(std::move(socket)) {}
  int turn(std::vector<pollfd>& fds);
  bool take_orders();
  void pin_frames(const FramePinOrder& order);
  bool take_completions();
  bool take_landed();
  bool take_layers();

  WorkerParts parts_;
  TransportPeers peers_{parts_.transport, parts_.clock};
  std::unique_ptr<ServerSocket> socket_;
  std::string scheduler_;  // sender of the last order; receives the outcomes
  SendOutcome send_ = [this](const std::string& bytes) { socket_->send(scheduler_, bytes); };
  Puller puller_{parts_, peers_, send_};
  Pusher pusher_{parts_, peers_, [this] { loop_.wake(); }};
  SlotGrants slots_{parts_, send_};
  RunHasher hasher_{parts_, send_};
  PollLoop loop_;
};

}  // namespace kvferry
