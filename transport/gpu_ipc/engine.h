// The progress thread: owner of the stream, of what is opened of peers, and of the control link. Private to this
// folder.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/gpu_ipc/device_transfer.h"
#include "transport/gpu_ipc/mappings.h"
#include "transport/make_transport.h"
#include "transport/task_inbox.h"

namespace kvferry::gpu_ipc {

/// Threads: post(), join() and what is const any; everything else belongs to the progress thread.
class Engine {
 public:
  /// What is handed in by reference outlives the engine. `stream`: its own, which it drops. `control`: carries
  /// notifications and tells who is alive; `region` is of it, for transfers without ranges.
  Engine(const GpuIpcOptions& options, TransferTable& transfer_table, DeviceStream stream, Transport& control, RegionId region);
  ~Engine();

  void start() { thread_ = std::thread(&Engine::run, this); }
  /// Runs the task on the progress thread, in order.
  void post(std::function<void()> task) { inbox_.post(std::move(task)); }
  /// After stop() was posted: waits for the thread's end.
  void join();

  /// `control_peer` and `control_region`: what stands for the peer on the control link.
  void add_peer(PeerId peer, PeerId control_peer, std::string control_region);
  void drop_peer(PeerId peer);
  void submit(AcceptedTransfer accepted);
  void feed(TransferId id, FedCopies more);
  void cancel(TransferId id);
  /// Ends every transfer; the thread ends when the device touches no memory any more.
  void stop();

 private:
  struct Peer {
    PeerId id;
    PeerId control;
    std::string control_region;
    std::shared_ptr<Mappings> mappings;
    bool is_greeted = false;
    bool is_welcome = false;  // it is alive, and the one that was meant
    std::string why_lost;     // empty: it is not
  };
  using PeerPtr = std::shared_ptr<Peer>;
  struct Transfer {
    DeviceTransfer device;
    PeerPtr peer;
    std::shared_ptr<Mappings> mappings;  // once it was given bytes
    TransferId announced;                // on the control link; 0: not yet
  };
  using TransferPtr = std::unique_ptr<Transfer>;
  /// What a transfer of the control link is for.
  struct ControlRequest {
    enum class Kind { kHello, kWatch, kAnnouncement } kind;
    PeerPtr peer;
    TransferId transfer;  // an announcement's
  };

  void run();
  bool drain_control();
  void sleep(TimeNs idle_ns);
  /// Whether it did something.
  bool advance_all();
  bool advance(Transfer& transfer);
  bool post_piece(Transfer& transfer);
  /// The bytes are there: tells the peer, and hears whether it lives. False: not now.
  bool announce(Transfer& transfer);
  void greet(const PeerPtr& peer);
  void on_errand(const ControlRequest& request, const Completion& completion);
  void lose(Peer& peer, const std::string& why);
  Transfer* find(TransferId id);
  void complete(TransferId id, ErrorCode code, std::string what, std::vector<std::uint32_t> corrupt_ranges = {});

  const GpuIpcOptions options_;
  TransferTable& table_;
  Device& device_;
  const DeviceStream stream_;
  Transport& control_;
  const RegionId control_region_;
  const SteadyClock clock_;

  TaskInbox inbox_;

  std::unordered_map<PeerId, PeerPtr> peers_;
  std::map<TransferId, TransferPtr> transfers_[3];  // of each priority, the oldest first
  std::vector<TransferId> over_;                    // to be erased
  std::unordered_map<TransferId, ControlRequest> control_requests_;
  std::vector<std::shared_ptr<Mappings>> given_up_;  // in which a device that stopped answering may still copy
  std::uint64_t bytes_in_flight_ = 0;
  bool is_polling_ = false;  // what the device does announces itself to nobody
  bool has_backlog_ = false;
  bool has_errands_to_push_ = false;
  bool is_stopping_ = false;
  std::thread thread_;
};

}  // namespace kvferry::gpu_ipc
