// The loop's side of the shared memory transport: all links, and what other processes want from this one. Private to
// this folder.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/transfer_table.h"
#include "transport/make_transport.h"
#include "transport/progress_loop.h"
#include "transport/shm/copy_thread_pool.h"
#include "transport/shm/messages.h"
#include "transport/shm/shared_page.h"
#include "transport/shm/shm_link.h"
#include "transport/shm/unix_socket.h"

namespace kvferry::shm {

/// Everything but open() in the loop only.
class ShmEngine final : public ProgressLoop::Owner {
 public:
  ShmEngine(const ShmOptions& options, std::uint64_t incarnation, TransferTable& transfer_table);
  Result<void> open();
  ProgressLoop& loop() { return loop_; }
  const Address& address() const { return address_; }
  std::string describe() const;

  void set_source_address(const std::string& address) { signature_ = address; }
  void add_peer(PeerId peer, Address address);
  void drop_peer(PeerId peer);
  void submit(AcceptedTransfer accepted);
  void feed(TransferId id, FedCopies more);
  void cancel(TransferId id);
  void add_region(RegionId region, OwnedFd fd, std::uint64_t fd_offset, std::uint64_t bytes);
  /// Peers let go of their mappings.
  void remove_region(RegionId region);
  /// kFull: every slot is taken.
  Result<std::uint32_t> reserve_slot();
  void free_slot(std::uint32_t slot) { free_slots_.push_back(slot); }
  void open_slot(std::uint32_t slot, RegionId region, GrantId grant) {
    control_->open(slot, ControlPage::pass(region.value, grant.value));
  }
  /// No peer enters it again. False: one is in the middle of a copy there; ask again.
  bool close_slot(std::uint32_t slot);
  /// Waits for peers that are in the middle of a copy, `silence_ns` at most.
  void shut_down();

  void on_ready(std::uint64_t tag, std::uint32_t events) override;
  bool advance(TimeNs now) override;
  TimeNs next_deadline() const override;
  void set_spinning(bool is_spinning) override;

 private:
  /// A peer's connection to this side.
  struct Inbound {
    OwnedFd socket;
    std::string from;  // empty: it has not said hello yet
    std::optional<NoteRing> ring;
    TimeNs accepted_at = 0;
  };
  struct SharedRegion {
    OwnedFd fd;
    std::uint64_t fd_offset = 0;
    std::uint64_t bytes = 0;
  };

  void accept_all();
  /// False: close it.
  bool serve(Inbound& inbound);
  bool on_packet(Inbound& inbound, const Packet& packet);
  bool on_hello(Inbound& inbound, const Packet& packet);
  void on_map_request(const Inbound& inbound, const Packet& packet) const;
  bool drain(Inbound& inbound);
  void close_inbound(std::uint32_t number);
  void drop_strangers(TimeNs now);
  void await_copies() const;

  const ShmOptions options_;
  TransferTable& table_;
  CopyThreadPool crew_;
  const SteadyClock clock_;
  Address address_;
  std::string signature_;  // who notifications are from
  OwnedFd listener_;
  std::optional<ControlPage> control_;
  std::uint64_t probe_ = 0;  // what peers read to try CMA
  std::unordered_map<PeerId, std::unique_ptr<ShmLink>> links_;
  std::unordered_map<std::uint32_t, Inbound> inbound_;
  std::uint32_t num_inbound_made_ = 0;
  std::size_t num_pending_handshakes_ = 0;
  bool has_backlog_ = false;  // notes wait in rings because the completion_queue is full
  std::unordered_map<RegionId, SharedRegion> regions_;
  std::vector<std::uint32_t> free_slots_;
  std::uint32_t num_slots_made_ = 0;
  bool is_spinning_ = false;
  bool is_stopping_ = false;
  ProgressLoop loop_;  // last: its thread uses all of the above
};

}  // namespace kvferry::shm
