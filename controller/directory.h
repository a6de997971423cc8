// The directory: which node is alive, and which of them holds which chunks. Pure: no I/O and no clock of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "controller/chunk_table.h"
#include "controller/client.h"
#include "controller/status.h"
#include "transport/base/clock.h"
#include "transport/base/ids.h"
#include "transport/base/result.h"

namespace kvferry::controller {

/// One registered (namespace, engine id, incarnation). Never used again, so whatever comes late for an expired node or
/// a fenced incarnation finds nobody.
using NodeId = StrongId<struct NodeIdTag, std::uint64_t>;

struct DirectoryOptions {
  std::int64_t lease_ms = 3000;  // a node without a word for so long is forgotten
  std::int64_t grace_ms = 1000;  // what every node gets after expire() itself was late: two heartbeats
  std::size_t nodes_max = 4096;
  std::size_t chunks_per_node_max = std::size_t{1} << 20;
  std::size_t chunks_max = std::size_t{1} << 24;  // (node, tier, chunk) over all nodes
  std::size_t tails_per_group_max = 256;
  std::size_t holders_per_reply_max = 64;
  IndexOptions index{};  // of each namespace's table; `seed` should come from the system's randomness
};

enum class Update {
  kApplied,
  kUnknownNode,     // nothing happened: the sender must register
  kSnapshotWanted,  // applied, but an earlier message of this node is missing: ask it for all that it holds
};

struct Joined {
  NodeId id;
  bool snapshot_wanted = false;
  std::optional<NodeId> fenced;  // the older incarnation that this one replaced
};

/// A node that dies, leaves or begins a snapshot is invisible at once, whatever it held; no call takes longer for it.
/// Messages of a node are numbered from the number it joins with. A publish or evict with a higher number than expected
/// is applied (it is true in itself), but shows that one was lost; the node then owes a snapshot until a publish with
/// `begins_snapshot` arrives, which drops all that was held before. A lower number is an old message and is ignored.
/// Threads: one at a time. `now` must never go back.
class Directory {
 public:
  explicit Directory(DirectoryOptions options = {}) : options_(options) {}

  /// A node is known by (namespace, engine id). The same incarnation again keeps what it held (its connection broke); a
  /// newer one replaces the older at once.
  /// kRefused: another fingerprint than the namespace's living nodes, or a newer incarnation is registered.
  /// kInvalidArgument: a field is empty, too long or not printable. kFull: nodes_max.
  Result<Joined> join(const NodeInfo& info, std::uint64_t next_sequence, TimeNs now);

  /// `next_sequence`: the number that the node's next publish or evict will have; shows that its last one was lost.
  Update heartbeat(NodeId node, std::uint64_t next_sequence, TimeNs now);
  Update publish(NodeId node, std::uint64_t sequence, bool begins_snapshot, std::span<const ChunkEntry> chunks,
                 TimeNs now, Tier tier = Tier::kHost);
  /// From all tiers.
  Update evict(NodeId node, std::uint64_t sequence, std::span<const ChunkKey> keys, TimeNs now);
  /// False: no such node.
  bool leave(NodeId node);

  /// Best first: most full chunks, then most recently heard of; at most holders_per_reply_max; never the asker.
  /// kNotFound: the asker is not registered.
  Result<std::vector<Holder>> lookup(NodeId asker, const LookupQuery& query, TimeNs now);

  /// Forgets nodes whose lease ran out and returns them. To be called much more often than lease_ms, with all waiting
  /// messages taken in before: a call that comes later than half a lease after the one before gives all nodes
  /// grace_ms, because then nobody knows whether they or the caller were silent. Also tidies a bit: of what the dead
  /// left behind, and of growing tables; well below a millisecond.
  std::vector<NodeId> expire(TimeNs now);

  /// Of the sequence numbers of this node, the next one expected. kUnknownNode's counterpart is 0.
  std::uint64_t next_sequence(NodeId node) const;
  std::vector<NodeStatus> status(TimeNs now) const;
  std::size_t num_nodes() const { return nodes_.size(); }
  std::size_t num_chunks() const { return num_chunks_; }
  std::uint64_t num_chunks_dropped() const { return num_chunks_dropped_; }
  /// Grows with each change of what a look-up may answer.
  std::uint64_t index_version() const { return index_version_; }

 private:
  struct Node;
  struct Namespace {
    std::string fingerprint;
    ChunkTable table;
    std::map<std::string, NodeId> nodes;                                // by engine id
    std::unordered_map<ChunkTable::HolderIndex, const Node*> by_index;  // of `table`
  };
  struct Node {
    NodeInfo info;
    Namespace* home = nullptr;
    ChunkTable::HolderIndex index = 0;  // in home->table
    TimeNs heard_at = 0;
    std::uint64_t next_sequence = 0;
    bool owes_snapshot = true;
  };

  Node* find(NodeId id);
  bool accept_sequence(Node& node, std::uint64_t sequence, bool& newly_owing);
  void forget(NodeId id);
  void tidy();

  DirectoryOptions options_;
  std::map<std::string, std::unique_ptr<Namespace>> namespaces_;
  std::unordered_map<NodeId, std::unique_ptr<Node>> nodes_;
  std::uint64_t last_node_id_ = 0;
  std::size_t num_chunks_ = 0;
  std::uint64_t num_chunks_dropped_ = 0;
  std::uint64_t index_version_ = 0;
  std::string tidied_last_;  // a namespace
  std::optional<TimeNs> expire_called_at_;
};

}  // namespace kvferry::controller
