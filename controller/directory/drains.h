// Emptying nodes that are to go: what only they hold is copied to others first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <vector>

#include "controller/api/client.h"
#include "controller/protocol/node_id.h"
#include "controller/protocol/snapshot_mark.h"
#include "transport/base/clock.h"

namespace kvferry::controller {

struct DrainOptions {
  std::size_t chunks_per_copy = 128;
  std::size_t copies_at_a_time = 4;  // of one drain
  TimeNs copy_ttl = 10 * kSecond;    // a target that has not brought it by then is not the right one
  unsigned tries_max = 3;            // targets that are tried for a chunk
};

/// A drain is asked for with begin(); the caller then has the node tell all that it holds, again. What comes new while
/// it drains is copied as well. Whether a copy has come is seen by where the chunks are, so that no answer can be lost.
/// Pure; time is handed in. Threads: one at a time.
class Drains {
 public:
  enum class Place { kNowhere, kOnlyThere, kElsewhere };
  /// What a drain has to know of the others.
  class Cluster {
   public:
    virtual ~Cluster() = default;
    /// Where, seen from `leaving`, a chunk is that it held.
    virtual Place place_of(NodeId leaving, const ChunkKey& key) const = 0;
    /// Nodes that may take its chunks, the emptiest first.
    virtual std::vector<NodeId> targets(NodeId leaving) const = 0;
  };
  /// `to` shall bring these from `from`.
  struct Copy {
    NodeId from, to;
    std::vector<ChunkEntry> chunks;
    TimeNs ttl = 0;
  };
  struct Progress {
    std::uint64_t num_left = 0;   // to be copied, or being copied
    std::uint64_t num_moved = 0;  // were only there and are elsewhere now
    std::uint64_t num_lost = 0;   // no target brought them
    bool is_told = false;         // the node has told all that it holds since begin()
    bool is_done() const { return is_told && num_left == 0; }
  };

  explicit Drains(DrainOptions options = {}) : options_(options) {}

  /// False: it is being drained already.
  bool begin(NodeId node) { return drains_.try_emplace(node).second; }
  /// False: it is not being drained.
  bool end(NodeId node) { return drains_.erase(node) > 0; }
  bool is_draining(NodeId node) const { return drains_.contains(node); }
  /// Of a node that is not being drained: nothing happens.
  void told(NodeId node, std::span<const ChunkEntry> chunks, SnapshotMark mark);
  /// Looks at what has come and says what to copy next. To be called every 100 ms or so.
  std::vector<Copy> advance(const Cluster& cluster, TimeNs now);
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
    std::uint64_t num_moved = 0, num_lost = 0;
    std::size_t next_target = 0;
    bool is_telling = false;
    bool is_told = false;
  };

  void check_running(NodeId node, Drain& drain, const Cluster& cluster, TimeNs now);
  Copy next_copy(NodeId node, Drain& drain, const Cluster& cluster, TimeNs now);

  DrainOptions options_;
  std::map<NodeId, Drain> drains_;
};

}  // namespace kvferry::controller
