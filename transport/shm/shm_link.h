// The connection to one peer: the socket, the peer's mapped regions and the pending transfers. Private to this folder.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transport/make_transport.h"
#include "transport/shm/copy_thread_pool.h"
#include "transport/shm/messages.h"
#include "transport/shm/shared_page.h"
#include "transport/shm/shm_transfer.h"
#include "transport/shm/unix_socket.h"
#include "transport/transfer_table.h"

namespace kvferry::shm {

/// Used under ProgressLoop's lock only. A link that has failed stays failed; its transfers end with kPeerLost.
class ShmLink {
 public:
  ShmLink(PeerId peer, Address address, const ShmOptions& options, TransferTable& transfer_table,
          CopyThreadPool& threads, const Clock& clock)
      : peer_(peer),
        address_(std::move(address)),
        options_(options),
        table_(transfer_table),
        threads_(threads),
        clock_(clock) {}
  ~ShmLink() { fail("this process disconnected the peer"); }
  ShmLink(const ShmLink&) = delete;
  ShmLink& operator=(const ShmLink&) = delete;

  /// Connects and sends the hello. Returns whether there is a socket to watch.
  bool connect(const std::string& source_address, TimeNs now);
  void on_readable(TimeNs now);
  void submit(AcceptedTransfer accepted);
  /// Adds copies to a transfer. Returns false if the transfer has ended.
  bool feed(const FedCopies& more);
  void cancel(TransferId id);
  void cancel_all(const std::string& what);
  /// Copies the next piece of the most urgent transfer. After the last piece, sends the transfer's notification, unless
  /// a checksum is wrong, and ends the transfer. Pings the peer if the transfer has to wait for the peer. Fails the
  /// link if the peer owes an answer and has been silent for too long. Returns true if the caller should call advance()
  /// again soon.
  bool advance(TimeNs now);
  TimeNs next_deadline() const;
  void fail(const std::string& why);

  bool is_failed() const { return is_failed_; }
  bool is_ready() const { return control_.has_value() && !is_failed_; }
  bool is_idle() const { return transfers_.empty(); }
  int socket() const { return socket_.get(); }
  PeerId peer() const { return peer_; }
  /// Returns text for logs that says how the peer's memory is reached.
  std::string describe() const;

 private:
  using RegionUse = std::pair<std::uint32_t, bool>;  // a region, and whether it is mapped for writing
  struct Region {
    std::optional<SharedMapping> pages;
    std::string refusal;
    bool is_requested = false;  // a map request was sent, which the peer has not answered yet
  };
  using Transfers = std::vector<std::unique_ptr<ShmTransfer>>;

  void on_packet(Packet packet, TimeNs now);
  void on_welcome(Packet packet);
  void on_map_reply(Packet packet);
  Transfers::iterator find(TransferId id);
  Transfers::iterator most_urgent();
  /// Returns true if the transfer made progress. The transfer may have ended.
  bool advance(Transfers::iterator transfer);
  bool notify_and_finish(Transfers::iterator transfer);
  /// Returns how to reach the peer's memory, or nullopt while a map request is unanswered. The caller must end the
  /// transfer after an error.
  Result<std::optional<RemoteMemory>> reach(const ShmTransfer& transfer);
  void finish(Transfers::iterator transfer, ErrorCode code, std::string what);
  void expect_answer(TimeNs now);

  const PeerId peer_;
  const Address address_;
  const ShmOptions& options_;
  TransferTable& table_;
  CopyThreadPool& threads_;
  const Clock& clock_;
  OwnedFd socket_;
  std::optional<NoteRing> ring_;
  std::optional<ControlPage> control_;
  int pid_ = 0;
  std::optional<std::string> member_;  // the member as which the peer knows this process; none: it knows no members
  std::string cma_refusal_;            // reason why CMA is not used; empty: CMA works
  std::map<RegionUse, Region> regions_;
  Transfers transfers_;  // pending transfers, the oldest first
  bool is_failed_ = false;
  std::string why_;
  bool is_blocked_ = false;  // if true, the most urgent transfer has to wait for the peer
  TimeNs received_at_ = 0;   // time of the last packet
  TimeNs owed_since_ = 0;    // since when the peer has owed an answer and sent no packet; 0: it owes none
  TimeNs advanced_at_ = 0;   // time of the last call of advance()
  TimeNs tried_at_ = 0;      // time at which the most urgent transfer last had to wait for the peer
};

}  // namespace kvferry::shm
