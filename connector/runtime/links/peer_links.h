// The other nodes as the scheduler node's thread knows them: how to reach each, and what it told of itself.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "connector/runtime/links/node_wire.h"
#include "connector/runtime/links/peer_versions.h"
#include "connector/runtime/worker/shapes.h"
#include "connector/runtime/links/zmq_link.h"
#include "transport/base/clock.h"

namespace kvferry {

/// Far longer than anything that is under way between two nodes lasts.
constexpr TimeNs kIdlePeer = 10 * 60 * kSecond;
/// ZeroMQ has 1023 sockets, and closes them a moment after they were given up.
constexpr std::size_t kPeersMax = 512;

/// A node is connected to when it is first spoken to. Whoever was neither spoken to nor heard for kIdlePeer is
/// forgotten, socket and all, and so is the longest idle one of `peers_max` when another is needed: nodes come and go
/// for months, and requests may name addresses that nobody answers at. Threads: one.
class PeerLinks {
 public:
  explicit PeerLinks(const Clock& clock, std::size_t peers_max = kPeersMax) : clock_(clock), peers_max_(peers_max) {}

  /// False: it is no address, or the queue to it is full.
  bool send(const std::string& endpoint, std::string_view bytes);
  struct Received {
    std::string endpoint;  // whom it was connected to
    std::string bytes;
  };
  std::optional<Received> receive();

  /// Of the node protocol.
  PeerVersions& versions() { return versions_; }
  std::uint32_t version_with(const std::string& endpoint) const { return versions_.spoken_with(endpoint); }

  /// What its last lease answer told: its ranks, and how they are read; no map: its shape is ours.
  struct Ranks {
    std::vector<RankEndpoint> all;
    ShardMap map;
  };
  void set_ranks(const std::string& endpoint, Ranks ranks);
  const Ranks& ranks_of(const std::string& endpoint) const;

  void forget_idle();
  std::size_t size() const { return peers_.size(); }
  /// Adds what to wait for.
  void add_to(std::vector<pollfd>& fds) const;

 private:
  struct Peer {
    std::unique_ptr<ClientSocket> socket;
    Ranks ranks;
    TimeNs used_at = 0;
  };
  using Peers = std::map<std::string, Peer>;  // by endpoint
  Peers::iterator forget(Peers::iterator peer);

  const Clock& clock_;
  std::size_t peers_max_;
  PeerVersions versions_;
  Peers peers_;
};

}  // namespace kvferry
