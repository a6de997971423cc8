// The state shared by a LoopbackFabric and its transports. Private to this folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "tests/transport/loopback/loopback_fabric.h"
#include "transport/transfer_table.h"

namespace kvferry {

struct LoopbackPeer {
  std::string address;
  bool lost = false;  // if true, transfers with this peer end with kPeerLost, as after a broken connection
};

/// The state of one transport. The core's lock guards all of it but the transfer table, which has its own lock.
struct LoopbackNode {
  LoopbackNode(std::uint32_t transfers_max, const std::string& grant_secret)
      : transfer_table(transfers_max, SecretNumbers(grant_secret), clock) {}
  std::uint64_t incarnation = 0;
  std::string address;
  std::string source_address;
  bool alive = true;
  const SteadyClock clock;
  TransferTable transfer_table;
  std::unordered_map<PeerId, LoopbackPeer> peers;
};

/// Threads: any. One lock guards everything, copies included, so that a killed node's memory is no longer touched when
/// kill() returns.
class LoopbackCore {
 public:
  explicit LoopbackCore(LoopbackOptions options);

  std::shared_ptr<LoopbackNode> add_node(std::uint32_t transfers_max);
  Result<PeerId> connect(LoopbackNode& node, const std::string& address);
  void disconnect(LoopbackNode& node, PeerId peer);
  Result<TransferId> submit(LoopbackNode& node, PagedTransfer transfer);
  Result<void> feed(LoopbackNode& node, TransferId id, const std::vector<CopyRange>& ranges,
                    std::vector<std::uint64_t> checksums, bool is_last);
  void cancel(LoopbackNode& node, TransferId id);
  void set_source_address(LoopbackNode& node, const std::string& address);
  double measured_rate() const { return options_.measured_rate; }
  bool is_alive(const LoopbackNode& node);
  void end(LoopbackNode& node);

  void hold();
  void release();
  bool step();
  void kill(const std::string& address);
  void fail_next(std::uint32_t num_transfers);

 private:
  struct Moving {
    LoopbackNode* owner;
    std::shared_ptr<LoopbackNode> target;
    AcceptedTransfer transfer;
    std::size_t num_copied;
    std::uint32_t delay_steps;
    std::optional<std::size_t> lost_at;  // number of copies after which the connection breaks
    std::vector<std::uint32_t> corrupt_ranges;
  };

  /// Returns the indices of the most urgent transfers to each peer, out of those that have something to do.
  std::vector<std::size_t> movable_locked() const;
  /// kRefused: the region was unregistered or the grant revoked.
  Result<void> copy_locked(Moving& moving);

  bool step_locked();
  void run_locked();
  void end_locked(LoopbackNode& node);
  void lose_locked(LoopbackNode& owner, PeerId peer, const std::string& what);
  void finish_locked(std::size_t index, ErrorCode code, std::string what);
  std::uint64_t random_below(std::uint64_t bound);

  std::mutex mutex_;
  const LoopbackOptions options_;
  std::mt19937_64 random_;
  bool held_;
  std::uint32_t fail_next_ = 0;
  std::uint64_t num_nodes_made_ = 0;
  // keyed by address; nodes stay here after their end
  std::unordered_map<std::string, std::shared_ptr<LoopbackNode>> nodes_;
  std::vector<Moving> moving_;
};

}  // namespace kvferry
