// The progress thread: owner of every UCX object of one transport. Private to this folder.
#pragma once

#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "transport/transfer_table.h"
#include "transport/make_transport.h"
#include "transport/ucx/commands.h"
#include "transport/ucx/packed.h"
#include "transport/ucx/ucp_worker.h"
#include "transport/ucx/ucx_peer.h"
#include "transport/ucx/ucx_transfer.h"

namespace kvferry::ucx {

/// Promise: each transfer posted with a SubmitCommand reaches transfer_table.complete() exactly once, also when its peer dies
/// or the engine stops, and by then UCX touches its memory no more. Threads: start(), post() and stop() as said there;
/// everything private belongs to the progress thread.
class ProgressEngine {
 public:
  /// Returns when the thread's worker is up, or with why it is not. The transfer_table outlives the engine.
  static Result<std::unique_ptr<ProgressEngine>> start(const UcxOptions& options, std::uint64_t incarnation,
                                                       TransferTable& transfer_table);
  ~ProgressEngine();

  /// Any thread. Nothing may be posted after a StopCommand.
  void post(Command command) { inbox_.post(std::move(command)); }
  /// After a StopCommand: waits for the thread's end.
  void join();

  /// What address() of the transport gives.
  const std::string& address() const { return address_; }
  /// Any thread: what carries the bytes, as far as known.
  std::string path() const;

 private:
  ProgressEngine(const UcxOptions& options, std::uint64_t incarnation, TransferTable& transfer_table);

  struct PeerEntry {
    std::unique_ptr<UcxPeer> peer;
    bool reported_ready = false;
    bool reported_lost = false;
    bool dropped = false;  // nobody will name it again: forget it when it is closed
  };

  void thread_main(std::promise<Result<void>> started);
  Result<void> set_up();
  void run();
  void tear_down();

  bool admit();
  void handle(SubmitCommand& command);
  void handle(FeedCommand& command);
  void handle(CancelCommand& command);
  void handle(AddPeerCommand& command);
  void handle(DropPeerCommand& command);
  void handle(MapMemoryCommand& command);
  void handle(UnmapMemoryCommand& command);
  void handle(StopCommand& command);

  void advance_transfers(TimeNs now);
  void advance_peers(TimeNs now);
  void complete_finished();
  /// False: a transfer asks its GPU, which no event announces.
  bool may_sleep() const;
  void wait_for_work(TimeNs now);
  TimeNs next_deadline(TimeNs now) const;

  /// reply_ep: of the sender, or null.
  void on_message(AmId id, std::string_view bytes, ucp_ep_h reply_ep);
  void on_hello(const Hello& hello, ucp_ep_h reply_ep);
  void on_welcome(const Welcome& welcome);
  void on_notification(NotificationMessage message);
  void on_blocks(std::string_view packed, ucp_ep_h reply_ep);
  void on_answer(std::string_view packed);

  const UcxOptions options_;
  const std::uint64_t incarnation_;
  TransferTable& table_;
  const SteadyClock clock_;
  Inbox inbox_;
  std::string address_;  // written before start() returns
  mutable std::mutex path_mutex_;
  std::string path_;

  struct Handler {
    ProgressEngine* engine;
    AmId id;
  };
  std::vector<Handler> handlers_;  // filled once: UCX holds their addresses
  std::unique_ptr<UcpWorker> worker_;
  std::unordered_map<PeerId, PeerEntry> peers_;
  AskedBook asked_;
  std::vector<std::unique_ptr<UcxTransfer>> transfers_;  // most urgent first, then oldest
  std::unordered_map<RegionId, LocalMemory> memories_;
  std::map<Device*, DeviceStream> hash_streams_;  // where checksums of a GPU's memory are taken
  bool stopping_ = false;

  std::thread thread_;
};

}  // namespace kvferry::ucx
