// Interface that receives each change of a directory's nodes and their chunks and stores it, so that a restart can
// restore the nodes and chunks.
#pragma once

#include <cstdint>
#include <span>

#include "controller/api/client.h"
#include "controller/api/status.h"
#include "controller/api/tier.h"
#include "controller/protocol/values.h"
#include "transport/base/clock.h"
#include "transport/base/ids.h"

namespace kvferry::controller {

/// The calls of joined(), gone(), published(), evicted() and snapshot_dropped() report the changes in order, each after
/// it was made; replaying all of them yields the same nodes and chunks. Threads: the directory's. No call blocks or
/// fails.
class Journal {
 public:
  virtual ~Journal() = default;

  /// Called when a new node registered, or a known node registered again.
  virtual void joined(NodeId node, const NodeInfo& info, std::uint64_t next_sequence) = 0;
  virtual void gone(NodeId node) = 0;
  /// `chunks`: chunks that the directory stored; `is_partial`: the directory dropped other chunks for lack of room.
  virtual void published(NodeId node, std::uint64_t sequence, SnapshotMark mark, Tier tier,
                         std::span<const ChunkEntry> chunks, bool is_partial) = 0;
  virtual void evicted(NodeId node, std::uint64_t sequence, std::span<const ChunkKey> keys) = 0;
  virtual void snapshot_dropped(NodeId node) = 0;

  /// Returns the sequence number below which the node's messages outlive the process. `next_sequence`: all messages
  /// with lower numbers were applied. The result may be lower than what is stored, and does not decrease until the node
  /// joins again.
  virtual std::uint64_t kept_below(NodeId node, std::uint64_t next_sequence) = 0;
  virtual StateStatus status(TimeNs now) const = 0;
};

}  // namespace kvferry::controller
