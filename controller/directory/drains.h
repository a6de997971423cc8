// Drains: chunks that only a leaving node holds are replicated to other nodes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <vector>

#include "controller/api/client.h"
#include "controller/protocol/values.h"
#include "transport/base/clock.h"

namespace kvferry::controller {

struct DrainOptions {
  std::size_t chunks_per_replication = 128;
  std::size_t replications_max = 4;  // concurrent replications of one drain
  // Time after which an unfinished replication is tried again, with the next target node if there are several.
  TimeNs replication_ttl = 10 * kSecond;
  unsigned tries_max = 3;  // limit on the tries to replicate a chunk
};

/// Decides which chunks of draining nodes are replicated, and where to. After begin() the caller must request a
/// snapshot from the node, because the snapshot lists all chunks of the node. Chunks that the node publishes during the
/// drain are replicated as well. The index shows which chunks have arrived at other nodes; no acknowledgements are
/// needed. Pure: time is an argument. Threads: one at a time.
class Drains {
 public:
  enum class Place { kNowhere, kOnlyThere, kElsewhere };
  /// What a drain needs to know about all nodes.
  class Cluster {
   public:
    virtual ~Cluster() = default;
    /// Returns kElsewhere if a node that is not leaving holds the chunk; otherwise kOnlyThere if `leaving` holds it,
    /// and kNowhere if not.
    virtual Place place_of(NodeId leaving, const ChunkKey& key) const = 0;
    /// Returns the nodes that may receive the chunks of `leaving`, the one with the fewest chunks first.
    virtual std::vector<NodeId> targets(NodeId leaving) const = 0;
  };
  /// An order to node `to`: replicate `chunks` from node `from`.
  struct Replication {
    NodeId from, to;
    std::vector<ChunkEntry> chunks;
    TimeNs ttl = 0;
  };
  struct Progress {
    std::uint64_t num_left = 0;  // chunks that wait or are being replicated
    // Number of chunks that only the leaving node held and that another node holds now.
    std::uint64_t num_replicated = 0;
    std::uint64_t num_lost = 0;  // chunks that tries_max replications did not bring to another node
    bool is_listed = false;      // the snapshot that the caller requested after begin() has ended
    bool is_done() const { return is_listed && num_left == 0; }
  };

  explicit Drains(DrainOptions options = {}) : options_(options) {}

  /// Returns false if the node is already being drained.
  bool begin(NodeId node) { return drains_.try_emplace(node).second; }
  /// Returns false if the node is not being drained.
  bool end(NodeId node) { return drains_.erase(node) > 0; }
  bool is_draining(NodeId node) const { return drains_.contains(node); }
  /// Adds the chunks to the node's drain; has no effect if the node is not being drained. Returns true if the caller
  /// must request a snapshot again, because the snapshot that `mark` ends began before the drain: its first chunks are
  /// unknown to the drain.
  bool published(NodeId node, std::span<const ChunkEntry> chunks, SnapshotMark mark);
  /// Checks running replications and returns the next ones. The caller must call advance() often, e.g. every 50 ms.
  std::vector<Replication> advance(const Cluster& cluster, TimeNs now);
  Progress progress(NodeId node) const;
  bool empty() const { return drains_.empty(); }

 private:
  struct Waiting {
    ChunkEntry chunk;
    unsigned num_tries = 0;
  };
  struct Running {
    TimeNs deadline = 0;
    unsigned num_tries = 0;
    std::vector<ChunkEntry> chunks;
  };
  struct Drain {
    std::deque<Waiting> waiting;
    std::vector<Running> running;
    std::uint64_t num_replicated = 0, num_lost = 0;
    std::size_t next_target = 0;
    bool is_listing = false;  // a snapshot has begun since begin()
    bool is_listed = false;
  };

  void check_running(NodeId node, Drain& drain, const Cluster& cluster, TimeNs now);
  Replication next_replication(NodeId node, Drain& drain, const Cluster& cluster, TimeNs now);

  DrainOptions options_;
  std::map<NodeId, Drain> drains_;
};

}  // namespace kvferry::controller
