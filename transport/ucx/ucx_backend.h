// The UCX backend: its progress thread owns every UCX object of one transport. Private to this folder.
#pragma once

#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "transport/address_secret.h"
#include "transport/inbox_backend.h"
#include "transport/make_transport.h"
#include "transport/ucx/net_devices.h"
#include "transport/ucx/packed.h"
#include "transport/ucx/ucp_worker.h"
#include "transport/ucx/ucx_peer.h"
#include "transport/ucx/ucx_transfer.h"

namespace kvferry::ucx {

/// Promise: TransferTable::complete() is called exactly once for each submitted transfer, also when the peer dies or
/// the backend stops, and by then UCX no longer touches the transfer's memory.
/// Threads: Backend says which threads may call its methods. The private members belong to the progress thread, except
/// `path_` and those that do not change after start().
class UcxBackend final : public InboxBackend {
 public:
  UcxBackend(const UcxOptions& options, NetDevices net_devices)
      : InboxBackend(options.transfers_max),
        options_(options),
        net_devices_(std::move(net_devices)),
        secret_(options.key) {}
  ~UcxBackend() override { join(); }
  /// Starts the progress thread and waits until its UCX worker is up. Returns an error if the thread can't use its GPU
  /// or can't set up the worker.
  Result<void> start();

  std::string address() const override { return address_; }
  std::string describe() const override;
  Result<std::uint64_t> check_address(const std::string& address) override;
  Result<RegionKey> open_region(RegionId id, const MemoryRegion& memory) override;
  Result<void> close_region(RegionId id, bool is_stopped) override;
  Result<GrantId> grant(RegionId region, std::uint64_t offset, std::uint64_t bytes, const GrantTerms& terms) override;
  void add_peer(PeerId peer, const std::string& address) override;
  void drop_peer(PeerId peer) override;
  void submit(AcceptedTransfer transfer) override;
  void feed(FedCopies more) override;
  void cancel(PeerId peer, TransferId id) override;
  void stop() override;

 private:
  struct PeerEntry {
    std::unique_ptr<UcxPeer> peer;
    bool reported_ready = false;
    bool reported_lost = false;
    bool is_dropped = false;  // if true, the entry is erased when the peer is closed and no transfer is left
  };
  using Transfers = std::vector<std::unique_ptr<UcxTransfer>>;

  void thread_main(std::promise<Result<void>> started);
  Result<void> set_up();
  bool turn() override;
  bool is_over() const override;
  void idle(TimeNs busy_at) override;
  void tear_down();

  Result<std::string> map_memory(RegionId id, const MemoryRegion& memory);
  Transfers::iterator find(TransferId id);
  void advance_transfers(TimeNs now);
  void advance_peers(TimeNs now);
  void complete_finished();
  /// Returns false while a transfer waits for its GPU, since no file descriptor becomes readable when the GPU is done.
  bool may_sleep() const;
  TimeNs next_deadline(TimeNs now) const;

  /// Handles a message. `reply_ep`: the sender's endpoint, or null if there is none.
  void on_message(AmId id, std::string_view bytes, ucp_ep_h reply_ep);
  void on_hello(const Hello& hello, const SecretCheck& sender, ucp_ep_h reply_ep);
  void on_welcome(const Welcome& welcome);
  void on_notification(NotificationMessage message);
  void on_blocks(std::string_view packed, ucp_ep_h reply_ep);
  void on_answer(std::string_view packed);

  /// Returns the message, or nullopt if it is malformed. Malformed messages are counted, and some of them logged.
  /// `what`: what the message should be, for the log.
  template <class Message>
  std::optional<Message> checked(Result<Message> message, std::string_view what);
  /// Returns what this transport knows of a message's sender by the message's secret. Messages of senders that are not
  /// accepted are counted, and some of them logged.
  SecretCheck sender_of(const std::string& secret);
  /// Returns the peer that was given this token, or null.
  UcxPeer* find_peer(std::uint64_t token);

  const UcxOptions options_;
  const NetDevices net_devices_;
  const AddressSecret secret_;
  std::uint64_t num_uninvited_messages_ = 0;
  std::uint64_t num_malformed_messages_ = 0;
  std::string address_;  // set before start() returns
  mutable std::mutex path_mutex_;
  std::string path_;  // the transports that UCX has chosen for the latest connection; empty before the first

  struct Handler {
    UcxBackend* backend;
    AmId id;
  };
  std::vector<Handler> handlers_;  // never changed after set_up(), because UCX holds pointers to the elements
  std::unique_ptr<UcpWorker> worker_;
  std::unordered_map<PeerId, PeerEntry> peers_;
  PendingMessages pending_messages_;
  Transfers transfers_;  // most urgent first, then oldest
  std::unordered_map<RegionId, LocalMemory> memories_;
  std::map<Device*, DeviceStream> hash_streams_;  // streams for the checksums of each GPU's memory
};

}  // namespace kvferry::ucx
