#include "connector/runtime/worker/transport_peers.h"

#include <utility>

namespace kvferry {

Result<TransferId> TransportPeers::submit(const std::string& address, PagedTransfer transfer) {
  const std::lock_guard lock(mutex_);  // held until running_ has the transfer, so that completed() finds it there
  const PeerId id = KVFERRY_TRY(transport_.connect(address));
  Peer& peer = peers_[id];
  peer.used_at = clock_.now();
  transfer.peer = id;
  Result<TransferId> submitted = transport_.submit(std::move(transfer));
  if (submitted) {
    running_.emplace(*submitted, id);
    ++peer.num_running;
  }
  return submitted;
}

void TransportPeers::completed(const Completion& completion) {
  const std::lock_guard lock(mutex_);
  const auto running = running_.extract(completion.id);
  if (!running) return;
  const auto peer = peers_.find(running.mapped());
  peer->second.used_at = clock_.now();
  peer->second.is_lost |= completion.code == ErrorCode::kPeerLost;
  if (--peer->second.num_running == 0 && peer->second.is_lost) disconnect(peer);
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
