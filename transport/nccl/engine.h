// The progress thread: owner of all sessions, channels and the control link of one transport. Private to this folder.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/nccl/inbound_link.h"
#include "transport/nccl/outbound_link.h"
#include "transport/task_inbox.h"

namespace kvferry::nccl {

/// Threads: post(), join() and what is const any; everything else belongs to the progress thread.
class Engine {
 public:
  /// All that is handed in outlives the engine, but for the control plane and the communicators, which it owns.
  Engine(const NcclOptions& options, TransferTable& transfer_table, std::unique_ptr<Communicators> communicators,
         std::unique_ptr<ControlPlane> control);
  ~Engine();

  void start();
  /// Runs the task on the progress thread, in order.
  void post(std::function<void()> task) { inbox_.post(std::move(task)); }
  /// After stop() was posted: waits for the thread's end.
  void join();

  const ControlAddress& control_address() const { return context_.control.address(); }
  std::string describe() const;

  void add_peer(PeerId peer, const Address& address);
  void drop_peer(PeerId peer);
  void submit(AcceptedTransfer transfer);
  void feed(TransferId id, FedCopies more);
  void cancel(TransferId id);
  void set_source_address(const std::string& address) { context_.signature = address; }
  /// Ends every transfer; the thread ends when nothing touches memory any more.
  void stop();

 private:
  struct Session {
    Link* link = nullptr;
    std::string from;  // who may speak in it
  };

  void run();
  void advance_links();
  void dispatch(const ControlPlane::Incoming& incoming);
  void welcome(const Message& message, const std::string& from);
  bool needs_polling() const;
  bool is_quiet(TimeNs now) const;
  void sleep(TimeNs now, TimeNs busy_at, bool polls);

  const NcclOptions options_;
  const std::unique_ptr<Communicators> communicators_;
  const std::unique_ptr<ControlPlane> control_;
  const SteadyClock clock_;
  StagingPool staging_;
  Context context_;

  TaskInbox inbox_;

  std::unordered_map<PeerId, std::unique_ptr<OutboundLink>> outbound_;
  std::vector<std::unique_ptr<OutboundLink>> dropped_;  // disconnected, not quiet yet
  std::vector<std::unique_ptr<InboundLink>> inbound_;
  std::unordered_map<std::uint64_t, Session> sessions_;
  bool is_stopping_ = false;
  TimeNs stop_until_ = 0;

  std::thread thread_;
};

}  // namespace kvferry::nccl
