// The books that every backend keeps alike: regions and who uses them, peers, and transfers that owe a Completion.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/outbox.h"
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
  std::uint64_t remote_base = 0;
  std::string rkey;
  std::vector<CopyRange> copies;
  std::string notification;
};

/// Threads: any; holds its own lock and calls nothing but the outbox under it.
class Ledger {
 public:
  explicit Ledger(std::uint32_t transfers_max) : transfers_max_(transfers_max) {}

  /// kInvalidArgument: null, empty or wrapping around the address space.
  static Result<void> check_region(const void* base, std::uint64_t bytes);
  /// Two steps, so that a backend can register the memory under the id before anybody may use it.
  RegionId new_region_id();
  void add_region(RegionId id, void* base, std::uint64_t bytes, std::string exported);
  Result<std::string> exported(RegionId region) const;
  Result<void> remove_region(RegionId region);

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
  /// True at the first request for a transfer that still owes its Completion.
  bool request_cancel(TransferId id);
  /// Pays the Completion: frees the region, then tells the outbox.
  void complete(TransferId id, ErrorCode code, std::string what);
  /// Transfers that owe a Completion.
  std::size_t num_open() const;

  Outbox& outbox() { return outbox_; }
  const Outbox& outbox() const { return outbox_; }

  static constexpr std::size_t kNotificationBytesMax = 65536;

 private:
  struct Region {
    std::byte* base = nullptr;
    std::uint64_t bytes = 0;
    std::string exported;
    std::uint32_t num_users = 0;
  };
  struct Peer {
    std::string address;
    std::uint64_t incarnation = 0;
  };
  struct Open {
    RegionId region;
    bool cancel_requested = false;
  };

  mutable std::mutex mutex_;
  const std::uint32_t transfers_max_;
  std::uint32_t num_regions_made_ = 0;
  std::uint32_t num_peers_made_ = 0;
  std::uint64_t num_transfers_made_ = 0;
  std::unordered_map<RegionId, Region> regions_;
  std::unordered_map<PeerId, Peer> peers_;
  std::unordered_map<std::string, PeerId> connected_;  // address to the peer that is not lost
  std::unordered_map<TransferId, Open> open_;
  Outbox outbox_;
};

}  // namespace kvferry
