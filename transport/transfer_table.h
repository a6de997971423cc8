// Bookkeeping shared by all backends: regions and grants with the copies that use them, peers, pending transfers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/base/clock.h"
#include "transport/base/secrets/secret_numbers.h"
#include "transport/completion_queue.h"
#include "transport/region_descriptor.h"
#include "transport/transport.h"

namespace kvferry {

/// The name of the member whose node asks for an access, which is empty for the holder of the cluster key. Without a
/// value: the backend does not know the member.
using AskingMember = std::optional<std::string_view>;
/// Checks a peer's access (`writes`: true for a write, false for a read) against the terms of its grant, which expires
/// at `expires_at` (0: never). kRefused: the access is not allowed.
Result<void> check_terms(GrantId grant, const GrantTerms& terms, TimeNs expires_at, bool writes, TimeNs now,
                         AskingMember member);

/// Checked ranges that feed() adds to a transfer.
struct FedCopies {
  TransferId id;
  PeerId peer;
  std::vector<CopyRange> copies;
  std::vector<std::uint64_t> checksums;
  bool is_last = false;
};

/// A transfer whose peer, regions, ranges and number of checksums TransferTable::accept() has checked.
struct AcceptedTransfer {
  TransferId id;
  PeerId peer;
  Direction direction = Direction::kPull;
  RegionId local;
  std::byte* local_base = nullptr;
  RegionDescriptor remote;
  // Ranges of submit() and of each feed(); those of one call are joined where they touch unless they have checksums.
  std::vector<CopyRange> copies;
  std::vector<std::uint64_t> checksums;  // one checksum for each copy, or empty
  std::string notification;
  Priority priority = Priority::kNormal;
  bool is_complete = true;  // false: feed() will add more ranges

  bool is_pull() const { return direction == Direction::kPull; }
  bool has_checksums() const { return !checksums.empty(); }
  void append(const FedCopies& more) {
    copies.insert(copies.end(), more.copies.begin(), more.copies.end());
    checksums.insert(checksums.end(), more.checksums.begin(), more.checksums.end());
    is_complete = more.is_last;
  }
};

/// The regions, grants, peers and pending transfers of one transport. Threads: any. While the table holds its lock, the
/// only other lock that it takes is the completion queue's.
class TransferTable {
 public:
  /// `grant_ids`: where the ids of grants come from. `clock`: says when they expire; it must outlive the table.
  TransferTable(std::uint32_t transfers_max, SecretNumbers grant_ids, const Clock& clock)
      : transfers_max_(transfers_max), clock_(clock), grant_ids_(std::move(grant_ids)) {}

  /// Returns the error of calls after a transport's shutdown.
  static Error is_shut_down() { return Error{ErrorCode::kCancelled, "this process has shut its transport down"}; }
  /// Checks memory to be registered. kInvalidArgument: the memory is null, empty or wraps around the address space.
  static Result<void> check_region(const void* base, std::uint64_t bytes);
  /// Same as check_region(), for backends that copy with the CPU. kUnavailable: the memory is GPU memory.
  static Result<void> check_host_region(const MemoryRegion& memory, std::string_view backend);
  /// Registering takes two steps, new_region_id() and add_region(), so that a backend can register the memory under the
  /// id before a transfer may use it.
  RegionId new_region_id();
  void add_region(RegionId id, const MemoryRegion& memory, std::string exported);
  Result<std::string> exported(RegionId region) const;
  /// Unregisters a region. kInvalidArgument: unknown region; kFull: own transfers or peers' copies still use the
  /// region, so the caller must call again.
  Result<void> remove_region(RegionId region);

  /// Makes a grant; `rkey` is put into the grant's RegionDescriptor. Errors: kInvalidArgument and kFull, as
  /// Transport::grant() returns them.
  Result<GrantId> add_grant(RegionId region, std::uint64_t offset, std::uint64_t bytes, const GrantTerms& terms,
                            std::string rkey);
  /// Returns when a grant that is made now would expire; 0: never.
  TimeNs expires_at(const GrantTerms& terms) const;
  Result<std::string> exported(GrantId grant) const;
  /// Revokes a grant: from the first call on, no access by it begins. kInvalidArgument: unknown grant; kFull: an access
  /// has not ended yet, so the caller must call again.
  Result<void> remove_grant(GrantId grant);
  /// Returns the address of the bytes that a peer's copy names, which stay registered until end_access(). `offset`
  /// counts from the grant's start or, if `grant` is 0, from the region's. kRefused: the region was unregistered, the
  /// grant was never given, is revoked or has expired, the region or grant does not cover the bytes, the grant does not
  /// allow this direction, or the region can be written only with a grant. With `member` also: the grant is another
  /// member's. Each refusal is counted.
  Result<std::byte*> begin_access(RegionId region, GrantId grant, std::uint64_t offset, std::uint64_t bytes,
                                  bool writes, AskingMember member = std::nullopt);
  void end_access(RegionId region, GrantId grant);
  std::uint64_t num_refused() const { return num_refused_; }

  struct Connected {
    PeerId peer;
    bool is_new = false;
  };
  /// Returns the id of the peer at an address. Makes a new id if no peer has this address, or if that peer was lost.
  Connected connect(const std::string& address, std::uint64_t incarnation);
  /// Removes a peer; new transfers with the peer are refused. Returns whether the peer was known.
  bool remove_peer(PeerId peer);
  /// Records a broken connection: the peer's id stays valid until remove_peer(), but connect() to its address makes a
  /// new id.
  void lose_peer(PeerId peer);

  /// Checks a transfer and records it as pending. Errors: kInvalidArgument and kFull, as Transport::submit() returns
  /// them.
  Result<AcceptedTransfer> accept(PagedTransfer transfer);
  /// Checks the ranges that are added to a transfer. kInvalidArgument: bad range or checksums, or the transfer takes no
  /// more ranges.
  Result<FedCopies> feed(TransferId id, std::vector<CopyRange> ranges, std::vector<std::uint64_t> checksums,
                         bool is_last);
  /// Returns the peer if the transfer is pending and this is the first request to cancel it, otherwise nullopt.
  std::optional<PeerId> request_cancel(TransferId id);
  /// Delivers the Completion; from now on the transfer no longer uses its region. `path`: Completion::path.
  void complete(TransferId id, ErrorCode code, std::string what, std::vector<std::uint32_t> corrupt_ranges = {},
                std::string_view path = {});
  /// Returns the number of pending transfers: accepted, and not completed.
  std::size_t num_open() const {
    const std::lock_guard lock(mutex_);
    return open_.size();
  }

  CompletionQueue& completion_queue() { return completion_queue_; }
  const CompletionQueue& completion_queue() const { return completion_queue_; }

  static constexpr std::size_t kNotificationBytesMax = 65536;
  static constexpr std::size_t kGrantsMax = 65536;

 private:
  struct Region {
    std::byte* base = nullptr;
    std::uint64_t bytes = 0;
    std::string exported;
    bool needs_grant_to_write = false;
    std::uint32_t num_users = 0;     // number of this side's pending transfers
    std::uint32_t num_accesses = 0;  // number of accesses that have begun (begin_access()) and not ended
  };
  struct Grant {
    RegionId region;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
    GrantTerms terms;
    TimeNs expires_at = 0;  // 0: never
    std::string exported;
    std::uint32_t num_accesses = 0;
    bool is_revoked = false;
  };
  struct Peer {
    std::string address;
    std::uint64_t incarnation = 0;
  };
  /// A transfer that was accepted and not completed.
  struct Open {
    PeerId peer;
    RegionId region;
    std::uint64_t remote_bytes = 0;
    bool cancel_requested = false;
    bool is_complete = true;
    bool has_checksums = false;
    bool has_ranges = false;
  };

  Result<std::byte*> open_access(RegionId region, GrantId grant, std::uint64_t offset, std::uint64_t bytes, bool writes,
                                 AskingMember member);
  Result<std::vector<CopyRange>> plan(const Open& open, std::vector<CopyRange> ranges, std::size_t num_checksums) const;

  mutable std::mutex mutex_;
  const std::uint32_t transfers_max_;
  const Clock& clock_;
  SecretNumbers grant_ids_;
  std::atomic<std::uint64_t> num_refused_{0};
  std::uint32_t num_regions_made_ = 0;
  std::uint32_t num_peers_made_ = 0;
  std::uint64_t num_transfers_made_ = 0;
  std::unordered_map<RegionId, Region> regions_;
  std::unordered_map<GrantId, Grant> grants_;
  std::unordered_map<PeerId, Peer> peers_;
  std::unordered_map<std::string, PeerId> connected_;  // key: address; only peers that are not lost
  std::unordered_map<TransferId, Open> open_;
  CompletionQueue completion_queue_;
};

}  // namespace kvferry
