// This side's connection to one peer: its socket, its mapped regions and the transfers on their way. Private to this
// folder.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/transfer_table.h"
#include "transport/make_transport.h"
#include "transport/shm/copy_thread_pool.h"
#include "transport/shm/messages.h"
#include "transport/shm/shared_page.h"
#include "transport/shm/shm_transfer.h"
#include "transport/shm/unix_socket.h"

namespace kvferry::shm {

/// The loop only. A link fails once and for good; its transfers then end with kPeerLost.
class ShmLink {
 public:
  ShmLink(PeerId peer, Address address, const ShmOptions& options, TransferTable& transfer_table, CopyThreadPool& crew)
      : peer_(peer), address_(std::move(address)), options_(options), table_(transfer_table), crew_(crew) {}
  ~ShmLink() { fail("disconnected"); }
  ShmLink(const ShmLink&) = delete;
  ShmLink& operator=(const ShmLink&) = delete;

  /// Connects and says hello, once. True: the socket wants to be watched.
  bool connect(const std::string& own_address, TimeNs now);
  void on_readable(TimeNs now);
  void submit(AcceptedTransfer accepted, TimeNs now);
  /// False: not a transfer of this link.
  bool feed(TransferId id, FedCopies& more);
  bool cancel(TransferId id);
  void cancel_all(const std::string& what);
  /// Copies the next piece of what is most urgent, tells the peer what is done, and asks after it when it is silent.
  /// True: call again soon.
  bool advance(TimeNs now);
  TimeNs next_deadline() const;
  void fail(const std::string& why);

  bool is_failed() const { return is_failed_; }
  bool is_ready() const { return control_.has_value() && !is_failed_; }
  bool is_idle() const { return transfers_.empty(); }
  int socket() const { return socket_.get(); }
  PeerId peer() const { return peer_; }
  /// One clause for logs.
  std::string describe() const;

 private:
  struct Region {
    std::optional<SharedPages> pages;
    std::string refusal;
    bool is_asked = false;
  };
  using Transfers = std::vector<std::unique_ptr<ShmTransfer>>;

  void on_packet(Packet packet, TimeNs now);
  void on_welcome(Packet packet);
  void on_map_reply(Packet packet);
  Transfers::iterator find(TransferId id);
  Transfers::iterator most_urgent();
  /// True: something was done for it. It may be over afterwards.
  bool advance(Transfers::iterator transfer, TimeNs now);
  bool notify_and_finish(Transfers::iterator transfer);
  /// None: not yet, or an error that ends the transfer.
  Result<std::optional<RemoteMemory>> reach(const ShmTransfer& transfer);
  void finish(Transfers::iterator transfer, ErrorCode code, std::string what);
  void expect_answer(TimeNs now);

  const PeerId peer_;
  const Address address_;
  const ShmOptions& options_;
  TransferTable& table_;
  CopyThreadPool& crew_;
  OwnedFd socket_;
  std::optional<NoteRing> ring_;
  std::optional<ControlPage> control_;
  int pid_ = 0;
  std::string cma_refusal_;  // empty: CMA works
  std::unordered_map<std::uint32_t, Region> regions_;
  Transfers transfers_;  // oldest first
  bool is_failed_ = false;
  std::string why_;
  bool is_blocked_ = false;  // the last piece could not be done: wait for the peer
  TimeNs heard_at_ = 0;
  TimeNs owed_since_ = 0;   // the peer has to answer; 0: nothing
  TimeNs advanced_at_ = 0;  // when this thread looked last
  TimeNs tried_at_ = 0;     // the blocked piece, last
};

}  // namespace kvferry::shm
