// The peers of a worker's transport. Peers that are lost or idle are disconnected, so that ended processes leave
// nothing behind in the transport, and so are the longest idle ones if there are too many: the addresses are those that
// other nodes name in their answers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

#include "transport/base/clock.h"
#include "transport/transport.h"

namespace kvferry {

/// The peers of one transport, with the time of their last use. Every method may be called from any thread.
class TransportPeers {
 public:
  static constexpr TimeNs kIdlePeerNs = 600 * kSecond;
  static constexpr std::size_t kPeersMax = 1024;  // limit on peers without a running transfer

  TransportPeers(Transport& transport, const Clock& clock, std::size_t peers_max = kPeersMax)
      : transport_(transport), clock_(clock), peers_max_(peers_max) {}

  /// Connects to the transport at `address` if it is not connected yet, sets the transfer's `peer`, and submits the
  /// transfer. Errors: those of Transport::connect() and submit().
  Result<TransferId> submit(const std::string& address, PagedTransfer transfer);
  /// Returns the path by which a transfer between these regions would go (Transport::path_between()). Connects to the
  /// transport at `address` if it is not connected yet.
  Result<std::string_view> path_between(const std::string& address, RegionId local, const std::string& remote_region);
  /// The caller must pass every completion of the transport to this function. Returns the limit of the transfer's path
  /// to its peer, in 10^6 bytes per second: the rate that the transport measured, or that of the fastest transfer if
  /// one was faster. 0: the transport has not measured the path yet.
  std::uint32_t completed(const Completion& completion);
  /// Disconnects peers that have no running transfer and were not used for kIdlePeerNs. The call is cheap enough for
  /// every turn of a loop.
  void expire();
  std::size_t size() const;

 private:
  struct Rates {
    double measured = 0, best = 0;  // bytes per second: as the transport measured it, and of the fastest transfer
  };
  struct Peer {
    std::size_t num_running = 0;  // number of transfers with this peer that have not completed
    TimeNs used_at = 0;
    bool is_lost = false;
    std::map<std::string, Rates, std::less<>> rates{};  // [path]
  };
  struct Running {
    PeerId peer;
    std::uint64_t bytes = 0;  // 0 if the transfer is fed, since it then takes as long as the computation
    TimeNs began = 0;
  };
  using Peers = std::map<PeerId, Peer>;
  Result<PeerId> connect(const std::string& address);
  Peers::iterator disconnect(Peers::iterator peer);
  std::uint32_t limit_of(Peer& peer, const Running& transfer, const Completion& completion) const;

  Transport& transport_;
  const Clock& clock_;
  std::size_t peers_max_;
  mutable std::mutex mutex_;
  Peers peers_;
  std::map<TransferId, Running> running_;
  TimeNs expired_at_ = 0;
};

}  // namespace kvferry
