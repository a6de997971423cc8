// The scheduler node's connections to other nodes, with the protocol version and the ranks that each node has reported.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "connector/runtime/links/node_wire.h"
#include "connector/runtime/links/shapes.h"
#include "connector/runtime/links/zmq_link.h"
#include "transport/base/clock.h"
#include "transport/base/versions.h"

namespace kvferry {

/// Chooses the protocol version for each node. Until a node has answered, messages to it are in the oldest version that
/// the sender speaks. Each message names the versions of its sender, so later messages are in the newest version that
/// both nodes speak. The class has no I/O and no clock, and is not thread-safe.
class PeerVersions {
 public:
  explicit PeerVersions(VersionRange ours = kNodeWire) : ours_(ours) {}

  std::uint32_t spoken_with(const std::string& endpoint) const;
  /// Records the newest version that this node shares with the sender of an answer; later messages use it. Errors:
  /// kRefused with a sentence, if they share none (nothing is recorded), or if this node can't read the answer's
  /// version.
  Result<void> learn(const std::string& endpoint, const Envelope& envelope);
  void drop(const std::string& endpoint) { spoken_.erase(endpoint); }
  /// Checks that this node can read a request. Errors: kRefused for the same reasons as learn(), with a sentence for
  /// the node that asks.
  Result<void> check(const std::string& who, const Envelope& envelope) const;

 private:
  Result<std::uint32_t> common(const std::string& who, const Envelope& envelope) const;

  VersionRange ours_;
  std::map<std::string, std::uint32_t> spoken_;
};

/// Time without a message after which a peer is dropped; far longer than any lease or push lasts.
constexpr TimeNs kIdlePeer = 10 * 60 * kSecond;
/// Limit on peers: about half of ZeroMQ's 1023 sockets, because ZeroMQ closes a dropped socket only a moment later.
constexpr std::size_t kPeersMax = 512;

/// The first message to a node opens the connection. A peer without a message in either direction for kIdlePeer is
/// dropped with its socket. If a new peer would exceed `peers_max`, the peer that was idle longest is dropped.
/// Otherwise sockets would accumulate: nodes come and go for months, and requests may name addresses without a node.
/// Not thread-safe.
class PeerLinks {
 public:
  explicit PeerLinks(const Clock& clock, std::size_t peers_max = kPeersMax, ZmqContextRef context = {})
      : clock_(clock), peers_max_(peers_max), context_(std::move(context)) {}

  /// Returns false if `endpoint` is not an address, no socket is left, or the peer's queue is full.
  bool send(const std::string& endpoint, std::string_view bytes);
  struct Received {
    std::string endpoint;  // the endpoint that the socket was connected to
    std::string bytes;
  };
  /// Returns the next message. Peers take turns, so that one that sends without a break does not delay the others.
  std::optional<Received> receive();

  /// Returns the versions of the node protocol that are spoken with each node.
  PeerVersions& versions() { return versions_; }
  std::uint32_t version_with(const std::string& endpoint) const { return versions_.spoken_with(endpoint); }

  /// The ranks in the last answer with which a node leased chunks. `map` is the result of fit_answer().
  struct Ranks {
    std::vector<RankEndpoint> all;
    ShardMap map;
  };
  void set_ranks(const std::string& endpoint, Ranks ranks);
  const Ranks& ranks_of(const std::string& endpoint) const;

  void drop_idle();
  std::size_t size() const { return peers_.size(); }
  /// Adds the sockets' file descriptors to `fds`, for the loop to wait for.
  void add_to(std::vector<pollfd>& fds) const;

 private:
  struct Peer {
    std::unique_ptr<ClientSocket> socket;
    Ranks ranks;
    TimeNs used_at = 0;
  };
  using Peers = std::map<std::string, Peer>;  // keyed by endpoint
  Peers::iterator drop(Peers::iterator peer);

  const Clock& clock_;
  std::size_t peers_max_;
  ZmqContextRef context_;
  PeerVersions versions_;
  Peers peers_;
  std::string last_heard_;  // endpoint of the last message
};

}  // namespace kvferry
