// The scheduler node's thread: one loop that serves the controller, the other nodes and this engine's workers.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "connector/runtime/links/directory_link.h"
#include "connector/runtime/links/lease_links.h"
#include "connector/runtime/links/push_links.h"
#include "connector/runtime/poll_loop.h"

namespace kvferry {

/// The scheduler core and its lock, shared by the thread of NodeLinks and the threads that call SchedulerNode.
struct SharedCore {
  mutable std::mutex mutex;
  std::condition_variable changed;    // notified after each event that may answer a pending lookup
  std::optional<SchedulerCore> core;  // empty until the workers are attached
  UnreportedSaves saves;
  std::string weights_epoch;  // see NodeReport in controller/api/node_report.h
};

class NodeLinks {
 public:
  NodeLinks(SharedCore& shared, std::unique_ptr<controller::Client> directory, std::unique_ptr<ServerSocket> server);
  ~NodeLinks() { shutdown(); }

  /// Connects to the workers and starts the thread.
  Result<void> start(const std::vector<WorkerHello>& workers);
  /// Queues the core's actions for the thread. The caller must hold the lock, and must call this after each event.
  /// Returns true if the caller should call wake(), best after the lock is released, because an action is urgent, or
  /// because the thread sleeps for longer than an action that is not urgent may wait (3 ms). Waking the thread may take
  /// the engine's own thread longer than planning a whole step, so actions that are not urgent, such as reports to the
  /// controller, wake it only if there were none for 200 ms.
  bool enqueue(std::vector<Action> actions);
  void wake() { loop_.wake(); }
  /// Deregisters from the controller and joins the thread. A second call does nothing.
  void shutdown();

 private:
  // All methods below run on the thread of NodeLinks.
  int turn(std::vector<pollfd>& fds);
  bool is_turn_due();
  void execute(Action action);
  bool take_requests();
  void tell_lives(const Asker& asker, const LivesRequest& asked);
  void refuse(const Asker& asker, std::uint32_t type, const Error& why);
  bool take_answers();
  bool take_outcomes();
  void with_core(const LinkParts::Event& event);

  SharedCore& shared_;
  SteadyClock clock_;
  std::unique_ptr<ServerSocket> server_;                    // receives the requests of other nodes
  PeerLinks peers_{clock_, kPeersMax, server_->context()};  // sends requests to other nodes
  std::vector<std::unique_ptr<ClientSocket>> workers_;      // [rank]
  std::vector<RankEndpoint> ranks_;                         // [rank]
  LinkParts parts_;
  DirectoryLink directory_;
  std::optional<LeaseLinks> leases_;  // empty until start() is called with the workers
  PushLinks pushes_{parts_};
  TimeNs next_tick_ = 0, next_report_ = 0;
  TimeNs turned_at_ = 0;       // begin of the last turn
  TimeNs last_actions_ = 0;    // begin of the last turn that had actions
  std::vector<Action> queue_;  // guarded by shared_.mutex
  bool sleeps_long_ = false;   // guarded by shared_.mutex; whether an action that is not urgent must wake the thread
  PollLoop loop_;
};

}  // namespace kvferry
