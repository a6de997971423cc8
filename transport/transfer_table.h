// The books that every backend keeps alike: regions and who uses them, peers, and transfers that owe a Completion.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "transport/completion_queue.h"
#include "transport/region_descriptor.h"
#include "transport/transport.h"

namespace kvferry {

/// A transfer whose every field was checked; a backend only has to move it.
struct AcceptedTransfer {
  TransferId id;
  PeerId peer;
  Direction direction = Direction::kPull;
  RegionId local;
  std::byte* local_base = nullptr;
  RegionDescriptor remote;
  std::vector<CopyRange> copies;  // with checksums: exactly the ranges that were given, else joined where they touch
  std::vector<std::uint64_t> checksums;  // one a copy, or empty
  std::string notification;
  Priority priority = Priority::kNormal;
  bool is_complete = true;  // false: more is fed
};

/// What feed() adds to one of them.
struct FedCopies {
  std::vector<CopyRange> copies;
  std::vector<std::uint64_t> checksums;
  bool is_last = false;
};

/// Threads: any; holds its own lock and calls nothing but the completion_queue under it.
class TransferTable {
 public:
  explicit TransferTable(std::uint32_t transfers_max) : transfers_max_(transfers_max) {}

  /// Of a transport that begins: no two ever have the same.
  static std::uint64_t random_incarnation();
  /// What a transport answers afterwards.
  static Error is_shut_down() { return Error{ErrorCode::kCancelled, "the transport is shut down"}; }
  /// kInvalidArgument: null, empty or wrapping around the address space.
  static Result<void> check_region(const void* base, std::uint64_t bytes);
  /// The same for backends whose processors copy. kUnavailable: GPU memory.
  static Result<void> check_host_region(const MemoryRegion& memory, std::string_view backend);
  /// Two steps, so that a backend can register the memory under the id before anybody may use it.
  RegionId new_region_id();
  void add_region(RegionId id, void* base, std::uint64_t bytes, std::string exported);
  Result<std::string> exported(RegionId region) const;
  Result<void> remove_region(RegionId region);

  /// `rkey` goes into the grant's descriptor as it is.
  Result<GrantId> add_grant(RegionId region, std::uint64_t offset, std::uint64_t bytes, std::string rkey);
  Result<std::string> exported(GrantId grant) const;
  /// Nobody can borrow by it from here on; kFull while somebody has borrowed: ask again.
  Result<void> remove_grant(GrantId grant);
  /// For a peer that names its bytes: memory that stays registered until it is given back. `grant` 0 names the region.
  /// kRefused: the region or the grant was taken back, or never covered these bytes.
  Result<std::byte*> borrow(RegionId region, GrantId grant, std::uint64_t offset, std::uint64_t bytes);
  void give_back(RegionId region, GrantId grant);

  struct Connected {
    PeerId peer;
    bool is_new = false;
  };
  Connected connect(const std::string& address, std::uint64_t incarnation);
  /// False when the peer is not known (any more). Afterwards transfers with it are refused.
  bool forget_peer(PeerId peer);
  /// The connection broke: the id lives on until forget_peer(), but its address gets a new id at the next connect().
  void lose_peer(PeerId peer);

  Result<AcceptedTransfer> accept(PagedTransfer transfer);
  Result<FedCopies> feed(TransferId id, const std::vector<CopyRange>& ranges, std::vector<std::uint64_t> checksums,
                         bool is_last);
  /// True at the first request for a transfer that still owes its Completion.
  bool request_cancel(TransferId id);
  /// Pays the Completion: frees the region, then tells the completion_queue.
  void complete(TransferId id, ErrorCode code, std::string what, std::vector<std::uint32_t> corrupt_ranges = {});
  /// Transfers that owe a Completion.
  std::size_t num_open() const;

  CompletionQueue& completion_queue() { return completion_queue_; }
  const CompletionQueue& completion_queue() const { return completion_queue_; }

  static constexpr std::size_t kNotificationBytesMax = 65536;
  static constexpr std::size_t kGrantsMax = 65536;

 private:
  struct Region {
    std::byte* base = nullptr;
    std::uint64_t bytes = 0;
    std::string exported;
    std::uint32_t num_users = 0;      // own transfers that owe a Completion
    std::uint32_t num_borrowers = 0;  // peers' copies under way
  };
  struct Grant {
    RegionId region;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
    std::string exported;
    std::uint32_t num_borrowers = 0;
    bool is_revoked = false;
  };
  struct Peer {
    std::string address;
    std::uint64_t incarnation = 0;
  };
  struct Open {
    RegionId region;
    std::uint64_t remote_bytes = 0;
    bool cancel_requested = false;
    bool is_complete = true;
    bool has_checksums = false;
    bool has_ranges = false;
  };

  Result<std::vector<CopyRange>> plan(const Open& open, const std::vector<CopyRange>& ranges,
                                      std::size_t num_checksums) const;

  mutable std::mutex mutex_;
  const std::uint32_t transfers_max_;
  std::uint32_t num_regions_made_ = 0;
  std::uint32_t num_peers_made_ = 0;
  std::uint32_t num_grants_made_ = 0;
  std::uint64_t num_transfers_made_ = 0;
  std::unordered_map<RegionId, Region> regions_;
  std::unordered_map<GrantId, Grant> grants_;
  std::unordered_map<PeerId, Peer> peers_;
  std::unordered_map<std::string, PeerId> connected_;  // address to the peer that is not lost
  std::unordered_map<TransferId, Open> open_;
  CompletionQueue completion_queue_;
};

}  // namespace kvferry
