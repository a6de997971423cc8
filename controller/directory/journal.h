// What a directory tells of each change that it makes, so that somebody can keep it over a restart.
#pragma once

#include <cstdint>
#include <span>

#include "controller/api/client.h"
#include "controller/protocol/node_id.h"
#include "controller/protocol/snapshot_mark.h"
#include "controller/api/status.h"
#include "controller/api/tier.h"
#include "transport/base/clock.h"
#include "transport/base/ids.h"

namespace kvferry::controller {

/// Each call tells of a change that has just been made, in the order in which they were; whoever makes the same changes
/// again has the same directory. Threads: the directory's. No call blocks or fails.
class Journal {
 public:
  virtual ~Journal() = default;

  /// A new node, or a known one that said Hello again.
  virtual void joined(NodeId node, const NodeInfo& info, std::uint64_t next_sequence) = 0;
  virtual void gone(NodeId node) = 0;
  /// `chunks`: those that were kept; `is_partial`: there were others.
  virtual void published(NodeId node, std::uint64_t sequence, SnapshotMark mark, Tier tier,
                         std::span<const ChunkEntry> chunks, bool is_partial) = 0;
  virtual void evicted(NodeId node, std::uint64_t sequence, std::span<const ChunkKey> keys) = 0;
  virtual void snapshot_dropped(NodeId node) = 0;

  /// All of the node's messages below this number outlive the process. `next_sequence`: all below were applied. Lags by
  /// a call, so it is to be called again and again; never goes back while the node lives.
  virtual std::uint64_t kept_below(NodeId node, std::uint64_t next_sequence) = 0;
  virtual StateStatus status(TimeNs now) const = 0;
};

}  // namespace kvferry::controller
