// The soak test: one transport here, two peers in separate processes, transfers as soak_plan.h decides them. Every
// promise of the contract is checked for each transfer.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tests/transport/soak_plan.h"
#include "tests/transport/soak_resources.h"
#include "tests/transport/transport_fixture.h"
#include "transport/shared_memory.h"

namespace kvferry::soak {

struct Options {
  std::string backend;
  std::uint64_t num_transfers = 20'000;
  std::uint64_t seed = 1;
  std::set<std::string> without;
  bool has_sanitizer = false;  // with a sanitizer, memory also grows for reasons of its own
};

class Soak {
 public:
  explicit Soak(Options options);
  /// Prints progress, and the last line. Returns true if nothing was wrong.
  bool run();

 private:
  static constexpr std::uint32_t kSlots = 32;

  struct Peer {
    std::unique_ptr<Remote> remote;
    std::uint32_t life = 0;  // number of the peer's processes so far
    PeerId id;
    std::uint64_t stopped_until = 0;  // number of the transfer until which the peer is stopped; 0: it runs
  };
  struct Pending {
    std::uint64_t number = 0;
    Plan plan;
    std::uint32_t slot = 0;
    std::uint32_t life = 0;
    PeerId peer;
    std::uint32_t damaged_range = 0;
    std::vector<std::uint64_t> checksums;
    std::vector<std::byte> expected;  // bytes that the destination must have afterwards, if they are verified
    std::optional<RemoteGrant> grant;
    bool is_revoked = false;
    std::vector<std::byte> at_revoke;  // bytes of the remote destination when revoke() had succeeded
    std::set<ErrorCode> allowed = {ErrorCode::kOk};
    std::uint32_t num_fed = 0;  // number of the 1 + num_feeds parts that were fed
    bool is_cancelled = false;
  };
  /// A slot that must not be used again before settle(), because bytes of a failed transfer may still arrive at the
  /// peer.
  struct Resting {
    std::uint32_t slot = 0;
    std::uint64_t number = 0;
    std::vector<std::byte> local;  // bytes of the local memory at the completion; empty if the transfer is not a pull
  };

  std::span<std::byte> local(std::uint32_t slot, std::uint64_t bytes);
  std::span<std::byte> remote(std::uint32_t peer, std::uint32_t slot, std::uint64_t bytes);
  RegionId local_region(std::uint32_t slot) const { return slot % 2 == 0 ? shared_region_ : plain_region_; }
  static std::uint64_t offset(std::uint32_t slot) { return slot / 2 * kSlotBytes; }
  static std::uint64_t remote_offset(std::uint32_t slot) { return slot * kSlotBytes; }

  void start_peer(std::uint32_t index);
  void connect(std::uint32_t index);
  void act(std::uint64_t number, const Plan& plan);
  void allow(PeerId peer, ErrorCode code);
  void resume(std::uint32_t index);

  void prepare(Pending& pending);
  void submit(std::uint64_t number, Plan plan);
  std::vector<CopyRange> part(const Pending& pending, std::uint32_t index) const;
  std::vector<std::uint64_t> checksums_of(const Pending& pending, std::uint32_t index) const;
  void check_refusal(PagedTransfer transfer);
  void feed(TransferId id, Pending& pending, bool is_all);
  /// Feeds, cancels and revokes what is due before transfer `number`. `hurries`: feeds everything that is left.
  void tend(std::uint64_t number, bool hurries);
  void revoke_early(Pending& pending);
  void collect(bool waits);
  void finish(const Completion& completion);
  void check_bytes(const Pending& pending, const Completion& completion);
  void give_back(Pending& pending);
  void await_notification(const Pending& pending);
  void read_notification(std::uint32_t peer, bool& has_more);
  void settle();
  void wrong(const Pending& pending, const std::string& what);

  const Options options_;
  const std::uint64_t restart_every_;
  SharedMemory shared_;
  std::vector<std::byte> plain_;
  std::unique_ptr<Transport> transport_;
  RegionId shared_region_;
  RegionId plain_region_;
  Peer peers_[2];
  std::deque<std::uint32_t> free_;
  std::map<TransferId, Pending> pending_;
  std::vector<Resting> resting_;
  std::vector<PeerId> left_;    // lost peers whose ids are not given up yet
  std::vector<bool> notified_;  // whether each transfer's notification has arrived, by transfer number

  std::map<ErrorCode, std::uint64_t> num_by_code_;
  std::uint64_t num_verified_ = 0;
  std::uint64_t num_restarts_ = 0;
  std::uint64_t num_wrong_ = 0;
  std::uint64_t num_bytes_ = 0;
};

}  // namespace kvferry::soak
