// Actions that the scheduler core asks its runtime to execute. The runtime takes the actions after each event and
// executes them in order.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "connector/core/chunk_meta.h"
#include "connector/core/peer_wire.h"
#include "connector/core/push_wire.h"
#include "connector/core/worker_core.h"
#include "transport/base/clock.h"
#include "transport/base/ids.h"

namespace kvferry {

// ---- fetches and replications: messages to the controller, to other nodes and to all workers ----
struct QueryDirectory {
  std::uint64_t fetch = 0;
  std::vector<ChunkKey> keys;         // keys of the full chunks, in the order of the prefix
  std::vector<ChunkKey> tail_groups;  // [i] group (chunk_meta.h) of the tails that follow the first i of `keys`
};
struct RequestLease {
  std::uint64_t fetch = 0;
  std::string endpoint;
  LeaseRequest request;
};
struct ReleaseLease {
  std::string endpoint;
  std::uint64_t lease = 0;
};
struct StartPull {
  std::uint64_t pull = 0;
  std::string endpoint;
  std::uint64_t lease = 0;
  TimeNs deadline = 0;
  std::vector<PullItem> items;
};

// ---- reports to the controller ----
struct PublishChunks {
  std::vector<ChunkMeta> chunks;
};
struct AnnounceEvictions {
  std::vector<ChunkKey> keys;
};

// ---- pushes, prefill side ----
/// Sends a push offer to the decode node.
struct OfferPush {
  std::uint64_t push = 0;
  std::string endpoint;
  PushOffer offer;
};
/// Orders all workers to push a chunk that is complete in its slot.
using StartPush = PushStart;
/// Tells the decode node which chunks of a push are complete, and which will not be completed.
struct SettlePush {
  std::string endpoint;
  PushSettlement settlement;
};
/// Tells the decode node which layers of chunks are in this node's frames.
struct AnnounceLayers {
  std::string endpoint;
  PushProgress progress;
};
/// Orders all workers to cancel the transfers of this push and to erase its state.
struct DropPush {
  std::uint64_t push = 0;
};

// ---- pushes, decode side: messages to all workers ----
using GrantSlots = GrantOrder;
using RevokeSlots = Revocation;
/// Tells all workers what they may pull of chunks that the prefill node still writes.
using GrowPull = PullProgress;

/// A message for the log; `warning` is true if an operator should read it.
struct LogLine {
  std::string text;
  bool warning = false;
  // Endpoint of the node, if the message says that fetches from a node are blocked (suspect_nodes.h); otherwise empty.
  std::string paused_node = {};
};

using Action =
    std::variant<QueryDirectory, RequestLease, ReleaseLease, StartPull, PublishChunks, AnnounceEvictions, OfferPush,
                 StartPush, AnnounceLayers, SettlePush, DropPush, GrantSlots, RevokeSlots, GrowPull, LogLine>;

}  // namespace kvferry
