// The shared memory backend: all links to other processes of this host, and their requests. Private to this folder.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/address_secret.h"
#include "transport/backend.h"
#include "transport/base/net/spare_fd.h"
#include "transport/make_transport.h"
#include "transport/progress_loop.h"
#include "transport/shm/copy_thread_pool.h"
#include "transport/shm/messages.h"
#include "transport/shm/shared_page.h"
#include "transport/shm/shm_link.h"
#include "transport/shm/unix_socket.h"

namespace kvferry::shm {

/// Threads: Backend says which threads may call its methods. The methods of ProgressLoop::Owner, and private methods
/// whose comments do not say otherwise, run under the loop's lock.
class ShmBackend final : public Backend, public ProgressLoop::Owner {
 public:
  explicit ShmBackend(const ShmOptions& options);
  /// Listens and starts the loop's thread.
  Result<void> start();

  // Overrides of Backend's methods.
  std::string address() const override { return encode(address_); }
  std::string describe() const override;
  Result<std::uint64_t> check_address(const std::string& address) override;
  void post(Task task) override { loop_.call(std::move(task)); }
  void join() override { loop_.stop(); }
  bool wait(TimeNs timeout_ns) override;
  void set_wait_interrupt_fd(int fd) override;
  Result<RegionKey> open_region(RegionId id, const MemoryRegion& memory) override;
  Result<void> close_region(RegionId id, bool is_stopped) override;
  Result<GrantId> grant(RegionId region, std::uint64_t offset, std::uint64_t bytes, const GrantTerms& terms) override;
  Result<void> revoke(GrantId grant) override;
  void add_peer(PeerId peer, const std::string& address) override;
  void drop_peer(PeerId peer) override { links_.erase(peer); }
  void submit(AcceptedTransfer accepted) override;
  void feed(FedCopies more) override;
  void cancel(PeerId peer, TransferId id) override;
  /// Does what Backend::stop() says, and waits, at most `silence_ns`, for peers that are in the middle of a copy.
  void stop() override;

  // Overrides of ProgressLoop::Owner's methods.
  void on_ready(std::uint64_t tag, std::uint32_t events) override;
  bool advance(TimeNs now) override;
  TimeNs next_deadline() const override;
  void set_spinning(bool is_spinning) override;

 private:
  /// A connection that a peer has made to this transport.
  struct Inbound {
    OwnedFd socket;
    std::string from;              // the peer's source address
    std::optional<NoteRing> ring;  // none before the peer's hello
    TimeNs accepted_at = 0;
    std::string secret = {};                 // the secret in the peer's hello
    std::optional<std::string> member = {};  // SecretCheck::member
    TimeNs ended_at = 0;  // when this side ended the connection and began to ignore the peer; 0: it has not
  };
  /// A region that peers can map.
  struct SharedRegion {
    OwnedFd fd;
    std::uint64_t fd_offset = 0;
    std::uint64_t bytes = 0;
  };
  struct Granted {
    RegionId region;
    std::uint32_t slot = 0;
  };

  void accept_all();
  // The functions up to follow_key() are defined in shm_backend_inbound.cpp.
  /// serve() handles what the peer has sent. It returns false, like the next three functions, if the connection must be
  /// closed.
  bool serve(Inbound& inbound);
  bool on_packet(Inbound& inbound, const Packet& packet);
  bool on_hello(Inbound& inbound, const Packet& packet);
  bool deliver_notes(Inbound& inbound);
  void on_map_request(const Inbound& inbound, const Packet& packet);
  void close_inbound(std::uint32_t number);
  /// Closes connections whose peers are too slow: to send their hello, or to close a connection that has ended.
  void drop_slow_peers(TimeNs now);
  /// Ends the connections of peers whose addresses were given to processes whose keys are not accepted any more.
  void follow_key(TimeNs now);
  void await_copies() const;

  // Regions and grants, each with a slot on the control page (shm_backend_regions.cpp). Any thread may call these
  // methods, one call at a time.
  Result<std::uint32_t> reserve_slot();
  /// Closes a slot, so that no peer begins a copy in the slot's memory. Returns false while a peer still copies there;
  /// the caller must then call close_slot() again later.
  bool close_slot(std::uint32_t slot);

  const ShmOptions options_;
  CopyThreadPool copy_threads_;
  const AddressSecret secret_;
  Address address_;
  OwnedFd listener_;
  net::SpareFd spare_;
  std::optional<ControlPage> control_;
  std::uint64_t probe_ = 0;  // peers read this variable to find out whether CMA works
  std::unordered_map<PeerId, std::unique_ptr<ShmLink>> links_;
  std::unordered_map<std::uint32_t, Inbound> inbound_;  // key: number of the connection
  std::vector<Inbound> departed_;  // peers that have disconnected, whose notifications wait for the completion queue
  std::uint32_t num_inbound_made_ = 0;
  std::size_t num_pending_handshakes_ = 0;
  std::size_t num_ended_ = 0;                   // number of entries of inbound_ with an `ended_at`
  TimeNs key_check_at_ = ProgressLoop::kNever;  // when to look at the cluster key again; kNever: it can't change
  std::uint64_t key_version_ = 0;
  bool has_backlog_ = false;  // advance() must read all rings: the completion queue was full, or polling has ended
  std::unordered_map<RegionId, SharedRegion> shared_regions_;
  bool is_spinning_ = false;

  std::unordered_map<GrantId, Granted> grants_;
  std::vector<std::uint32_t> free_slots_;
  std::uint32_t num_slots_made_ = 0;

  ProgressLoop loop_;  // last member, so that its thread, which uses all others, ends first
};

}  // namespace kvferry::shm
