#include "connector/runtime/links/peer_links.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace kvferry {

std::uint32_t PeerVersions::spoken_with(const std::string& endpoint) const {
  const auto known = spoken_.find(endpoint);
  return known == spoken_.end() ? ours_.oldest : known->second;
}

Result<void> PeerVersions::learn(const std::string& endpoint, const Envelope& envelope) {
  const std::uint32_t version = KVFERRY_TRY(common("the node at " + endpoint, envelope));
  spoken_[endpoint] = version;
  if (ours_.has(envelope.version)) return {};
  return Error{
      ErrorCode::kRefused,
      fmt::format("this node can't read the answer in node protocol version {}; its next request will use version {}",
                  envelope.version, version)};
}

Result<void> PeerVersions::check(const std::string& who, const Envelope& envelope) const {
  const std::uint32_t version = KVFERRY_TRY(common(who, envelope));
  if (ours_.has(envelope.version)) return {};
  return Error{ErrorCode::kRefused,
               fmt::format("the node that was asked can't read node protocol version {}; the nodes will use version {}",
                           envelope.version, version)};
}

Result<std::uint32_t> PeerVersions::common(const std::string& who, const Envelope& envelope) const {
  const VersionRange theirs = envelope.newest == 0 ? VersionRange{envelope.version, envelope.version}
                                                   : VersionRange{envelope.oldest, envelope.newest};
  return common_version("node protocol", {"this node", version(), ours_}, {who, envelope.release, theirs});
}

bool PeerLinks::send(const std::string& endpoint, std::string_view bytes) {
  auto found = peers_.find(endpoint);
  if (found == peers_.end()) {
    auto socket = ClientSocket::connect(endpoint, context_);
    if (!socket) return false;
    if (peers_.size() >= peers_max_)
      drop(std::ranges::min_element(peers_, {}, [](const auto& peer) { return peer.second.used_at; }));
    found = peers_.emplace(endpoint, Peer{std::move(*socket), {}, 0}).first;
  }
  found->second.used_at = clock_.now();
  return found->second.socket->send(bytes);
}

std::optional<PeerLinks::Received> PeerLinks::receive() {
  auto next = peers_.upper_bound(last_heard_);
  for (std::size_t i = 0; i < peers_.size(); ++i, ++next) {
    if (next == peers_.end()) next = peers_.begin();
    auto& [endpoint, peer] = *next;
    if (auto bytes = peer.socket->receive()) {
      peer.used_at = clock_.now();
      last_heard_ = endpoint;
      return Received{endpoint, std::move(*bytes)};
    }
  }
  return {};
}

void PeerLinks::set_ranks(const std::string& endpoint, Ranks ranks) {
  const auto found = peers_.find(endpoint);
  if (found != peers_.end()) found->second.ranks = std::move(ranks);
}

const PeerLinks::Ranks& PeerLinks::ranks_of(const std::string& endpoint) const {
  static const Ranks none;
  const auto found = peers_.find(endpoint);
  return found == peers_.end() ? none : found->second.ranks;
}

void PeerLinks::drop_idle() {
  const TimeNs now = clock_.now();
  for (auto peer = peers_.begin(); peer != peers_.end();)
    peer = now - peer->second.used_at > kIdlePeer ? drop(peer) : std::next(peer);
}

PeerLinks::Peers::iterator PeerLinks::drop(Peers::iterator peer) {
  versions_.drop(peer->first);
  return peers_.erase(peer);
}

void PeerLinks::add_to(std::vector<pollfd>& fds) const {
  for (const auto& [endpoint, peer] : peers_) fds.push_back({peer.socket->fd(), POLLIN, 0});
}

}  // namespace kvferry
