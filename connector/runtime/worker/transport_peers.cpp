#include "connector/runtime/worker/transport_peers.h"

#include <algorithm>
#include <utility>

namespace kvferry {

Result<TransferId> TransportPeers::submit(const std::string& address, PagedTransfer transfer) {
  const std::lock_guard lock(mutex_);  // held until running_ has the transfer, so that completed() finds it there
  const PeerId id = KVFERRY_TRY(connect(address));
  Peer& peer = peers_.at(id);
  transfer.peer = id;
  Running running{id, 0, peer.used_at};
  for (const CopyRange& range : transfer.ranges) running.bytes += transfer.is_fed ? 0 : range.bytes;
  Result<TransferId> submitted = transport_.submit(std::move(transfer));
  if (submitted) {
    running_.emplace(*submitted, running);
    ++peer.num_running;
  }
  return submitted;
}

/// Connects to a peer and marks it as just used. The caller must hold mutex_. A peer that is not connected yet takes
/// the place of the longest idle one if there are peers_max_ of them.
Result<PeerId> TransportPeers::connect(const std::string& address) {
  const PeerId id = KVFERRY_TRY(transport_.connect(address));
  const auto [found, is_new] = peers_.try_emplace(id);
  found->second.used_at = clock_.now();
  if (!is_new || peers_.size() <= peers_max_) return id;
  auto idle = peers_.end();
  for (auto peer = peers_.begin(); peer != peers_.end(); ++peer) {
    const bool is_idle = peer != found && peer->second.num_running == 0;
    if (is_idle && (idle == peers_.end() || peer->second.used_at < idle->second.used_at)) idle = peer;
  }
  if (idle != peers_.end()) disconnect(idle);
  return id;
}

Result<std::string_view> TransportPeers::path_between(const std::string& address, RegionId local,
                                                      const std::string& remote_region) {
  const std::lock_guard lock(mutex_);
  const PeerId id = KVFERRY_TRY(connect(address));
  return transport_.path_between(id, local, remote_region);
}

std::uint32_t TransportPeers::completed(const Completion& completion) {
  const std::lock_guard lock(mutex_);
  const auto running = running_.extract(completion.id);
  if (!running) return 0;
  const auto peer = peers_.find(running.mapped().peer);
  peer->second.used_at = clock_.now();
  const std::uint32_t limit = limit_of(peer->second, running.mapped(), completion);
  peer->second.is_lost |= completion.code == ErrorCode::kPeerLost;
  if (--peer->second.num_running == 0 && peer->second.is_lost) disconnect(peer);
  return limit;
}

std::uint32_t TransportPeers::limit_of(Peer& peer, const Running& transfer, const Completion& completion) const {
  constexpr double kMega = 1e6, kMost = 4e9;  // kMost limits the result to 32 bits
  auto found = peer.rates.find(completion.path);
  if (found == peer.rates.end()) found = peer.rates.emplace(completion.path, Rates{}).first;
  Rates& rates = found->second;
  if (const TimeNs time = peer.used_at - transfer.began; completion.code == ErrorCode::kOk && time > 0)
    rates.best = std::max(rates.best, static_cast<double>(transfer.bytes) * 1e9 / static_cast<double>(time));
  if (rates.measured == 0) rates.measured = transport_.measured_rate(transfer.peer, completion.path);
  if (rates.measured == 0) return 0;
  return static_cast<std::uint32_t>(std::min(std::max(rates.measured, rates.best) / kMega, kMost));
}

void TransportPeers::expire() {
  const std::lock_guard lock(mutex_);
  const TimeNs now = clock_.now();
  if (now - expired_at_ < kIdlePeerNs / 16) return;
  expired_at_ = now;
  for (auto peer = peers_.begin(); peer != peers_.end();) {
    const bool is_idle = peer->second.num_running == 0 && now - peer->second.used_at >= kIdlePeerNs;
    peer = is_idle ? disconnect(peer) : std::next(peer);
  }
}

std::size_t TransportPeers::size() const {
  const std::lock_guard lock(mutex_);
  return peers_.size();
}

TransportPeers::Peers::iterator TransportPeers::disconnect(Peers::iterator peer) {
  transport_.disconnect(peer->first);
  return peers_.erase(peer);
}

}  // namespace kvferry
