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
#include "transport/base/ids.h"
#include "transport/base/result.h"

namespace kvferry {

using RegionId = StrongId<struct RegionIdTag, std::uint32_t>;      // a local registered region
using PeerId = StrongId<struct PeerIdTag, std::uint32_t>;          // a connected peer, from this side
using TransferId = StrongId<struct TransferIdTag, std::uint64_t>;  // an accepted transfer, unique per transport

enum class Direction : std::uint8_t { kPull, kPush };

/// One run of bytes: [local_offset, +bytes) of the local region against [remote_offset, +bytes) of the remote one.
struct CopyRange {
  std::uint64_t local_offset = 0;
  std::uint64_t remote_offset = 0;
  std::uint64_t bytes = 0;
};

/// A description, not a handle: copies freely, owns nothing.
struct PagedTransfer {
  PeerId peer;
  Direction direction = Direction::kPull;
  RegionId local;
  std::string remote_region;  // what the peer's export_region() gave
  std::vector<CopyRange> ranges;
  std::string notification;  // non-empty: delivered to the peer after all bytes are visible there (push) or read (pull)
};

/// code is kOk, kCancelled, kPeerLost or kInternal; when it is delivered nobody touches the transfer's local memory.
struct Completion {
  TransferId id;
  ErrorCode code = ErrorCode::kOk;
  std::string what;  // empty when ok
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

  /// Makes [base, base + bytes) reachable. The memory must stay mapped until unregister_region() or shutdown() returns.
  virtual Result<RegionId> register_region(void* base, std::uint64_t bytes) = 0;
  /// Opaque bytes naming the region for peers (base, size, rkey).
  virtual Result<std::string> export_region(RegionId region) const = 0;
  /// kInvalidArgument: unknown region; kFull: own transfers still use it. What peers still do with it is not known
  /// here: agree with them before the memory is unmapped.
  virtual Result<void> unregister_region(RegionId region) = 0;

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
  /// Asks; the Completion still comes (kCancelled, or kOk if it was faster), once the memory is quiet.
  virtual void cancel(TransferId id) = 0;

  /// What finished or arrived since the last call; never blocks.
  virtual std::vector<Completion> poll() = 0;
  virtual std::vector<Notification> poll_notifications() = 0;
  /// A file descriptor that is readable while poll() or poll_notifications() would return something.
  virtual int event_fd() const = 0;

  /// Ends all transfers (kCancelled), joins the progress thread. Idempotent; the destructor calls it.
  virtual void shutdown() = 0;
};

}  // namespace kvferry
