// The transport: moves byte ranges between registered memory of two processes, push or pull, and tells the outcome
// once.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/base/clock.h"
#include "transport/base/device.h"
#include "transport/base/ids.h"
#include "transport/base/result.h"

namespace kvferry {

using RegionId = StrongId<struct RegionIdTag, std::uint32_t>;      // a local registered region
using PeerId = StrongId<struct PeerIdTag, std::uint32_t>;          // a connected peer, from this side
using TransferId = StrongId<struct TransferIdTag, std::uint64_t>;  // an accepted transfer, unique per transport
using GrantId = StrongId<struct GrantIdTag, std::uint32_t>;        // a part of a region lent to a peer

/// Memory to register. `fd` says that it is a shared mapping of that file from `fd_offset` on, which lets peers on the
/// same host map it too (SharedMemory::region()); -1: memory of any other kind, a tensor for example. `device` says
/// whose GPU memory it is; whoever registers it sees to it that what a stream writes there is done before a transfer
/// reads it.
struct MemoryRegion {
  void* base = nullptr;
  std::uint64_t bytes = 0;
  int fd = -1;  // read once, at registration; the caller may close it afterwards
  std::uint64_t fd_offset = 0;
  Device* device = nullptr;  // outlives the registration; nullptr: host memory
};

enum class Direction : std::uint8_t { kPull, kPush };

/// One run of bytes: [local_offset, +bytes) of the local region against [remote_offset, +bytes) of the remote one.
struct CopyRange {
  std::uint64_t local_offset = 0;
  std::uint64_t remote_offset = 0;
  std::uint64_t bytes = 0;
};

/// Of the transfers that wait for the same peer an urgent one goes first, also before the rest of a running one.
enum class Priority : std::uint8_t { kUrgent, kNormal, kBackground };

/// A description, not a handle: copies freely, owns nothing.
struct PagedTransfer {
  PeerId peer;
  Direction direction = Direction::kPull;
  RegionId local;
  std::string remote_region;  // what the peer's export_region() gave
  std::vector<CopyRange> ranges;
  std::string notification;  // non-empty: delivered to the peer after all bytes are visible there (push) or read (pull)
  Priority priority = Priority::kNormal;
  /// More ranges follow by feed(), layer by layer; the notification and the Completion come after the last of them.
  bool is_fed = false;
  /// XXH3-64 of each range's bytes, in order, or empty: not checked. Checked as the bytes arrive, in the same pass.
  std::vector<std::uint64_t> checksums = {};
};

/// code is kOk, kCancelled, kPeerLost, kCorrupt (a checksum differs, no notification was sent), kRefused (the peer took
/// the memory back: revoke(), unregister_region()) or kInternal; when it is delivered nobody touches the transfer's
/// local memory.
struct Completion {
  TransferId id;
  ErrorCode code = ErrorCode::kOk;
  std::string what;                                // empty when ok
  std::vector<std::uint32_t> corrupt_ranges = {};  // of all ranges in the order given, with code kCorrupt only
  bool operator==(const Completion&) const = default;
};

struct Notification {
  std::string from;  // the sender's address()
  std::string body;
};

/// Threads: every method may be called from any thread; calls never block on the network. One progress thread inside
/// owns all native objects. Promise: each accepted transfer gets exactly one Completion, also when the peer dies or the
/// transport shuts down, and by then its memory is no longer touched.
class Transport {
 public:
  virtual ~Transport() = default;

  /// Opaque bytes with which a peer can connect() to this transport; valid for this incarnation only.
  virtual std::string address() const = 0;
  /// One sentence for logs: which path and library carries the bytes.
  virtual std::string describe() const = 0;

  /// Makes the memory reachable. It must stay mapped until unregister_region() or shutdown() returns.
  /// kUnavailable: this backend, or the library below it, can't reach memory of this kind.
  virtual Result<RegionId> register_region(const MemoryRegion& memory) = 0;
  Result<RegionId> register_region(void* base, std::uint64_t bytes) {
    return register_region(MemoryRegion{base, bytes});
  }
  /// Opaque bytes naming the region for peers (base, size, rkey).
  virtual Result<std::string> export_region(RegionId region) const = 0;
  /// kInvalidArgument: unknown region; kFull: own transfers still use it, or a peer is seen in the middle of a copy;
  /// ask again. Peers may be refused from the first time on. Backends that reach into memory by the network card can't
  /// see what peers still do with it: agree with them before the memory is unmapped.
  virtual Result<void> unregister_region(RegionId region) = 0;

  /// Lends [offset, +bytes) of a region: the receiver's credit for a push. A transfer that names export_grant() as its
  /// remote_region counts remote offsets from the grant's start and is refused beyond its end.
  /// kInvalidArgument: unknown region or bounds; kFull: too many grants at a time.
  virtual Result<GrantId> grant(RegionId region, std::uint64_t offset, std::uint64_t bytes) = 0;
  virtual Result<std::string> export_grant(GrantId grant) const = 0;
  /// Takes it back. Once it returns ok nobody reads or writes by this grant any more and the memory may be used anew;
  /// later transfers by it end with kRefused. kFull: a peer is in the middle of a copy right now; ask again. A peer
  /// that dies ends its copies. kInvalidArgument: unknown, or revoked before.
  virtual Result<void> revoke(GrantId grant) = 0;

  /// kInvalidArgument: malformed address. The connection itself is made lazily; a dead peer shows as kPeerLost
  /// completions. Connecting twice to one address gives one PeerId, unless it was lost in between: then a new one. A
  /// lost PeerId stays known until disconnect(), and what is submitted to it completes with kPeerLost.
  virtual Result<PeerId> connect(const std::string& address) = 0;
  /// In-flight transfers with this peer complete with kPeerLost or kOk; the id is dead afterwards.
  virtual void disconnect(PeerId peer) = 0;

  /// kInvalidArgument: bad peer, region or range (bounds are checked on both sides before anything moves);
  /// kFull: too many in flight or unread, poll and try again; kCancelled: shut down. On error nothing was accepted and
  /// no Completion follows.
  virtual Result<TransferId> submit(PagedTransfer transfer) = 0;
  /// More ranges for a transfer that was submitted with is_fed; `checksums` for all of its ranges or for none.
  /// kInvalidArgument: bad range, or nothing more may follow. What was fed before stays fed.
  virtual Result<void> feed(TransferId id, std::vector<CopyRange> ranges, std::vector<std::uint64_t> checksums,
                            bool is_last) = 0;
  /// Asks; the Completion still comes (kCancelled, or kOk if it was faster), once the memory is quiet.
  virtual void cancel(TransferId id) = 0;

  /// What finished or arrived since the last call; never blocks.
  virtual std::vector<Completion> poll() = 0;
  virtual std::vector<Notification> poll_notifications() = 0;
  /// A file descriptor that is readable while poll() or poll_notifications() would return something.
  virtual int event_fd() const = 0;
  /// Returns when poll() or poll_notifications() would return something (true) or `timeout_ns` has passed (false). The
  /// calling thread does the progress thread's work meanwhile where a backend has such a way, so that no thread has to
  /// wake another: the fastest way to wait. One thread at a time gains by it; others wait on the descriptor.
  virtual bool wait(TimeNs timeout_ns);

  /// For a transport that is made of others. wait() also returns, with false, while `fd` is readable; false: this one
  /// has no way to.
  virtual bool set_wait_interrupt_fd(int fd);
  /// The address that signs this side's notifications instead of address(). Before the first connect().
  virtual void set_source_address(const std::string& address);

  /// Ends all transfers (kCancelled), waits for a peer that is seen in the middle of a copy, joins the progress thread.
  /// Idempotent; the destructor calls it.
  virtual void shutdown() = 0;
};

}  // namespace kvferry
