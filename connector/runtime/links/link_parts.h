// The objects that the parts of NodeLinks share: the core, and the sockets to other nodes and to this engine's workers.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "connector/core/scheduler/scheduler_core.h"
#include "connector/runtime/links/node_wire.h"
#include "connector/runtime/links/peer_links.h"
#include "connector/runtime/links/zmq_link.h"
#include "transport/base/clock.h"
#include "transport/base/log.h"
#include "transport/make_transport.h"

namespace kvferry {

/// [chunk] Number of workers that have not yet reported that the save has ended, in the slot too. A worker with a GPU
/// may report a save in a later step.
using UnreportedSaves = std::map<ChunkRef, std::uint32_t>;

/// All referenced objects outlive the parts of NodeLinks. The send functions return false if the message could not be
/// queued.
struct LinkParts {
  /// with_core() calls the given function with the core and the time, under the core's lock, and queues the core's
  /// actions.
  using Event = std::function<void(SchedulerCore& core, TimeNs now)>;
  std::function<void(const Event&)> with_core;
  PeerLinks& peers;
  ServerSocket& server;
  const std::vector<std::unique_ptr<ClientSocket>>& workers;  // [rank]
  const std::vector<RankEndpoint>& ranks;                     // [rank] endpoint of this node's rank
  const UnreportedSaves& saves;                               // guarded by the core's lock
  const std::string& weights_epoch;                           // guarded by the core's lock
  const Clock& clock;

  template <class Body>
  bool send_node(const std::string& endpoint, std::uint64_t id, const Body& body) const {
    return peers.send(endpoint, seal(id, body, peers.version_with(endpoint)));
  }
  template <class Body>
  bool answer(const Asker& asker, const Body& body) const {
    return server.send(asker.sender, seal(asker.id, body, asker.version));
  }
  /// Returns the transport address of one of this node's ranks as an asker gets it: with a list of members, only the
  /// asker reaches the rank by it. Empty if the worker has told no proper address.
  static std::string address_of(const RankEndpoint& rank, const Asker& asker) {
    if (asker.curve_key.empty()) return rank.transport_address;
    Result<std::string> own = address_for(rank.transport_address, asker.curve_key);
    if (!own) log().error("an answer to a node has no transport address of a rank: {}", own.error().what);
    return own ? *std::move(own) : std::string();
  }
  template <class Body>
  bool send_worker(std::uint32_t rank, std::uint64_t id, const Body& body) const {
    return workers[rank]->send(seal(id, body));
  }
};

}  // namespace kvferry
