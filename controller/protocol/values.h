// Values that messages and the directory share: ids of nodes, the role of a Publish, holders that a lookup found.
#pragma once

#include <cstdint>
#include <span>

#include "controller/api/client.h"
#include "transport/base/clock.h"
#include "transport/base/ids.h"

namespace kvferry::controller {

/// One registered (namespace, engine id, incarnation). Never reused, so late messages of an expired node or a fenced
/// incarnation match no node.
using NodeId = StrongId<struct NodeIdTag, std::uint64_t>;

/// A snapshot lists everything that a node holds.
enum class SnapshotMark {
  kNone,
  kReplaces,  // voids at once all that the node held before
  kBegins,    // what the node held before counts until the end; what it publishes from here on counts after it too
  kEnds,      // last message of the snapshot
};

/// A Holder without copies, and what the directory ranks it by.
struct HolderView {
  const NodeInfo* info = nullptr;
  std::uint32_t num_full_chunks = 0;
  std::span<const ChunkEntry> tails;
  Tier tier = Tier::kHost;
  bool confirmed = true;
  TimeNs heard_at = 0;
  bool is_leaving = false;
};

}  // namespace kvferry::controller
