// The transport: moves byte ranges between registered memory of two processes, by push or pull, and reports each
// outcome once.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/clock.h"
#include "transport/base/device.h"
#include "transport/base/ids.h"
#include "transport/base/result.h"

namespace kvferry {

using RegionId = StrongId<struct RegionIdTag, std::uint32_t>;      // a local registered region
using PeerId = StrongId<struct PeerIdTag, std::uint32_t>;          // a peer to which this transport is connected
using TransferId = StrongId<struct TransferIdTag, std::uint64_t>;  // an accepted transfer, unique per transport
using GrantId = StrongId<struct GrantIdTag, std::uint64_t>;        // a peer's right to access a part of a region

/// Memory to register. With `fd` it is a shared mapping of that file from `fd_offset` on, as SharedMemory::region()
/// returns it; peers on the same host map the file too if its seal F_SEAL_SHRINK keeps it from getting shorter. With
/// `device` it is memory of that GPU; the caller must submit a transfer only after the GPU has written the bytes that
/// the transfer reads. With neither it is any other host memory.
struct MemoryRegion {
  void* base = nullptr;
  std::uint64_t bytes = 0;
  int fd = -1;  // read once, at registration; the caller may close it afterwards
  std::uint64_t fd_offset = 0;
  Device* device = nullptr;  // must outlive the registration; nullptr: host memory
  // If true, peers need a grant to write. The gpu_ipc backend and UCX's one-sided operations don't check this.
  bool needs_grant_to_write = false;
};

enum class Direction : std::uint8_t { kPull, kPush };

/// What a grant allows, apart from its bytes. Each access is checked: by the owner's transport or, in the shared memory
/// backend, by the peer's.
struct GrantTerms {
  bool reads = true;    // peers may pull
  bool writes = true;   // peers may push
  TimeNs lasts_ns = 0;  // the grant expires after this time; 0: it does not expire
  /// Name of the member (net::Identity) that may use the grant, if there is a list of members. Empty: every peer may.
  std::string member = {};
};

/// One run of bytes: [local_offset, +bytes) of the local region and [remote_offset, +bytes) of the remote one.
struct CopyRange {
  std::uint64_t local_offset = 0;
  std::uint64_t remote_offset = 0;
  std::uint64_t bytes = 0;
};

/// The bytes of an urgent transfer are moved first, also before the rest of a running transfer with the same peer.
enum class Priority : std::uint8_t { kUrgent, kNormal, kBackground };

/// Describes a transfer. It is no handle: it can be copied freely and owns nothing.
struct PagedTransfer {
  PeerId peer;
  Direction direction = Direction::kPull;
  RegionId local;
  std::string remote_region;  // result of the peer's export_region() or export_grant()
  std::vector<CopyRange> ranges;
  std::string notification;  // if not empty: delivered to the peer after all bytes arrived (push) or were read (pull)
  Priority priority = Priority::kNormal;
  /// If true, feed() adds more ranges. Unless the transfer fails or is cancelled before, its notification and
  /// Completion come after the last of these ranges.
  bool is_fed = false;
  /// chunk_checksum() of each range's bytes, in order. The transport compares them with the bytes that it moves; if one
  /// differs, the transfer ends with kCorrupt. Empty: the bytes are not verified.
  std::vector<std::uint64_t> checksums = {};
};

/// The outcome of a transfer, whose local memory is no longer touched. `code` is kOk, kCancelled, kPeerLost (the peer
/// died, was silent for too long or was disconnected, or the connection failed), kCorrupt (a checksum differs; no
/// notification was sent), kRefused (for example, the grant was revoked or does not allow the transfer, the region was
/// unregistered, or the peer takes no notification) or kInternal (any other failure, see `what`).
struct Completion {
  TransferId id;
  ErrorCode code = ErrorCode::kOk;
  std::string what;                                // the reason; empty if kOk
  std::vector<std::uint32_t> corrupt_ranges = {};  // with kCorrupt: indices among all submitted and fed ranges
  // Name of the backend that the planner chose; "ucx/tcp" if UCX uses TCP alone. Without a planner "ucx/tcp" or empty.
  std::string_view path = {};
  /// Ignores `path`, on which the outcome must not depend.
  bool operator==(const Completion& other) const {
    return id == other.id && code == other.code && what == other.what && corrupt_ranges == other.corrupt_ranges;
  }
};

struct Notification {
  std::string from;  // the sender's address, see set_source_address()
  std::string body;
  std::optional<std::string> member = {};  // name of the member that sent it over TCP, if there is a list of members
};

/// Moves bytes between this process and its peers. Threads: every method may be called from any thread; only wait() and
/// shutdown() wait for peers. Each backend has a progress thread, so transfers go on while no method is called.
/// Promise: each accepted transfer gets exactly one Completion, also if the peer dies or the transport shuts down, and
/// by then the transfer's local memory is no longer touched.
class Transport {
 public:
  virtual ~Transport() = default;

  /// Returns opaque bytes with which a peer can connect() to this transport; valid for this incarnation only.
  virtual std::string address() const = 0;
  /// Returns text for logs: how the bytes are moved.
  virtual std::string describe() const = 0;

  /// Lets transfers of both sides use the memory, which must stay mapped until unregister_region() has succeeded or
  /// shutdown() has returned. kUnavailable: this transport can't reach memory of this kind.
  virtual Result<RegionId> register_region(const MemoryRegion& memory) = 0;
  Result<RegionId> register_region(void* base, std::uint64_t bytes) {
    return register_region(MemoryRegion{base, bytes});
  }
  /// Returns opaque bytes that name the region to peers, for PagedTransfer::remote_region.
  virtual Result<std::string> export_region(RegionId region) const = 0;
  /// Unregisters a region. kInvalidArgument: unknown region; kFull: own transfers or a peer's copy still use the
  /// region, so the caller must call again. Peers may be refused from the first call on. The backend can't see accesses
  /// by network cards or by peers' GPUs: the caller must agree with such peers before it unmaps the memory.
  virtual Result<void> unregister_region(RegionId region) = 0;

  /// Lets peers access [offset, +bytes) of a region, on `terms`, until revoke(). A transfer whose remote_region is the
  /// result of export_grant() counts remote offsets from the grant's start, and is refused outside of the grant. No
  /// peer can guess the result of export_grant(), which contains 64 unpredictable bits. kInvalidArgument: unknown
  /// region, or bad bounds or terms; kFull: too many grants; kUnavailable: this backend gives no grants of this memory,
  /// because it could not revoke them.
  virtual Result<GrantId> grant(RegionId region, std::uint64_t offset, std::uint64_t bytes,
                                const GrantTerms& terms) = 0;
  Result<GrantId> grant(RegionId region, std::uint64_t offset, std::uint64_t bytes) {
    return grant(region, offset, bytes, GrantTerms{});
  }
  virtual Result<std::string> export_grant(GrantId grant) const = 0;
  /// Revokes a grant. Once this returns ok, no peer accesses the memory by the grant any more, and transfers that name
  /// it end with kRefused. kFull: a peer's copy still uses the grant, so the caller must call again; the copy ends at
  /// the latest when the peer dies. kInvalidArgument: the grant is unknown, or was revoked before.
  virtual Result<void> revoke(GrantId grant) = 0;

  /// Returns the id of the peer at an address. kInvalidArgument: the address is malformed, of another protocol version,
  /// or of a peer that can't be reached; kCancelled: the transport is shut down. The connection is made later;
  /// transfers with a dead peer complete with kPeerLost. The same address gives the same PeerId until the peer is lost
  /// or disconnected. A lost peer's id stays valid until disconnect().
  virtual Result<PeerId> connect(const std::string& address) = 0;
  /// Removes a peer, whose id is invalid afterwards. Transfers that this call ends complete with kPeerLost.
  virtual void disconnect(PeerId peer) = 0;

  /// Starts a transfer. kInvalidArgument: a field is bad (both sides' bounds are checked before anything moves); kFull:
  /// too many transfers are pending or have unread completions, the caller must poll and try again; kCancelled: the
  /// transport is shut down. After an error no Completion follows.
  virtual Result<TransferId> submit(PagedTransfer transfer) = 0;
  /// Adds ranges to a transfer that was submitted with is_fed. Either all ranges of a transfer have checksums or none.
  /// kInvalidArgument: bad range or checksums, or the transfer takes no more ranges; nothing was added. kCancelled: the
  /// transport is shut down.
  virtual Result<void> feed(TransferId id, std::vector<CopyRange> ranges, std::vector<std::uint64_t> checksums,
                            bool is_last) = 0;
  /// Ends the transfer soon. Its Completion has kCancelled unless the transfer has ended in another way before, and
  /// comes when the transfer no longer uses its local memory.
  virtual void cancel(TransferId id) = 0;

  /// poll() returns the completions, and poll_notifications() the notifications, that have arrived since the last call.
  virtual std::vector<Completion> poll() = 0;
  virtual std::vector<Notification> poll_notifications() = 0;
  /// Returns a file descriptor that is readable while poll() or poll_notifications() would return something.
  virtual int event_fd() const = 0;
  /// Returns true once poll() or poll_notifications() would return something, false when `timeout_ns` has passed. Where
  /// a backend can, the calling thread does the progress thread's work meanwhile, which saves waking another thread:
  /// the fastest way to wait. Only one thread at a time can do so; others sleep on the descriptor.
  virtual bool wait(TimeNs timeout_ns) = 0;
  /// From now on wait() also returns while `fd` is readable. Further calls add descriptors. Must be called before the
  /// first wait().
  virtual void set_wait_interrupt_fd(int fd) = 0;
  /// Returns how many accesses of peers to its memory this transport has refused: the region was unregistered, a needed
  /// grant was missing, the grant was unknown, revoked or expired, or the access exceeded the region, the grant or the
  /// grant's terms.
  virtual std::uint64_t num_refused() const { return 0; }
  /// Returns the rate that was measured to the peer over the path of this name (Completion::path), in bytes per second.
  /// 0: no rate was measured.
  virtual double measured_rate(PeerId /*peer*/, std::string_view /*path*/) const { return 0; }
  /// Returns the name of the path by which a transfer between these regions would go; empty: this transport has one
  /// path only. kUnavailable: no path reaches both regions or, with GPU memory, no path has been found to work by
  /// measuring it; the message has the reason. kInvalidArgument: unknown peer or bad region.
  virtual Result<std::string_view> path_between(PeerId /*peer*/, RegionId /*local*/,
                                                const std::string& /*remote_region*/) const {
    return std::string_view();
  }
  /// Peers get `address` instead of address() as the sender of this side's notifications. Needed if this transport is
  /// part of another transport, to whose address peers connect. Must be called before the first connect().
  virtual void set_source_address(const std::string& address) = 0;

  /// Ends all own transfers (kCancelled), waits for a limited time for the copies that peers are making in this
  /// transport's memory, as far as the backend can see them (see unregister_region()), and joins the progress thread.
  /// Idempotent; the destructor calls shutdown().
  virtual void shutdown() = 0;
};

}  // namespace kvferry
