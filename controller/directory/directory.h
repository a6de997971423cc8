// The directory of nodes and of their chunks. Over 200 lines, because one class owns the nodes, leases and chunks and
// answers all questions about them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "controller/api/client.h"
#include "controller/api/status.h"
#include "controller/directory/journal.h"
#include "controller/index/chunk_table.h"
#include "controller/protocol/values.h"
#include "transport/base/clock.h"
#include "transport/base/ids.h"
#include "transport/base/result.h"
#include "transport/base/wall_clock.h"

namespace kvferry::controller {

struct DirectoryOptions {
  std::int64_t lease_ms = 2500;        // a node that is silent for this long is removed (five heartbeats)
  std::int64_t grace_ms = 1000;        // shortest time left of a lease after a late expire() (two heartbeats)
  std::int64_t snapshot_ms = 10'000;   // a snapshot that has not ended after this time is dropped
  std::int64_t repair_retry_ms = 200;  // shortest time until a repair request to a node is repeated
  std::size_t nodes_max = 4096;
  std::size_t chunks_per_node_max = std::size_t{1} << 20;
  std::size_t chunks_max = std::size_t{1} << 24;  // limit on (node, tier, chunk) entries of all nodes
  std::size_t tails_per_group_max = 256;
  std::size_t holders_per_reply_max = 64;
  // Returns the newest incarnation (a time) that a node may register with now; nullptr: no limit. Without a
  // limit a node could register with so new an incarnation that all its later processes would be refused.
  std::uint64_t (*newest_incarnation)() = nullptr;
  WallClock wall_ms = nullptr;  // nullptr: clocks are not compared
  IndexOptions index{};         // options of each namespace's table; `seed` should be random
};

enum class Update {
  // The message was applied, or it was dropped because it is old or because it follows a loss whose repair was already
  // requested.
  kApplied,
  kUnknownNode,  // the sender is not registered, and nothing changed
  // Messages of this node are missing, or a snapshot is needed: the caller must request what repair() returns.
  kRepairWanted,
};

/// The missing messages or the snapshot to request from a node.
struct Repair {
  std::uint64_t heard_below = 0;  // the node has used all sequence numbers below this one
  std::uint64_t resend_from = 0;  // sequence number that the directory expects next
  // If true, sending messages again is enough; if false, the node must begin a snapshot at resend_from or later.
  bool resend_will_do = false;
};

struct Joined {
  NodeId id;
  bool snapshot_wanted = false;
  // Messages are missing: the caller must request what repair() returns; never true with snapshot_wanted.
  bool resend_wanted = false;
  std::optional<NodeId> fenced;  // id of the older incarnation that the new node replaced
};

/// Registered nodes, their leases and their chunks.
/// The Publish and Evict messages of a node are numbered, starting with the number that the node registers with. They
/// are applied in order. A message whose number is below the expected one is a repetition and is dropped. A higher
/// number shows that a message was lost: the higher one is dropped, and the node must send it again after the missing
/// ones, because a publish applied after a later evict would undo the evict. The first message of a snapshot makes all
/// earlier messages irrelevant, so it is applied even after a loss. A snapshot is collected in a separate Generation,
/// which replaces the former Generation when the snapshot ends. Lookups don't see the chunks of the snapshot before
/// then, except if the former Generation was empty. Messages that arrive during a snapshot change both generations. A
/// snapshot that takes too long, or that the node begins again, is dropped. Lookups skip a node as soon as it leaves or
/// expire() finds that its lease has expired. The removal of a node takes the same time however many chunks the node
/// had. Threads: one at a time. `now` must never decrease.
class Directory {
  struct Namespace;

 public:
  /// The chunks that a node has published since it registered or since one of its snapshots began, without the evicted
  /// ones.
  struct Generation {
    ChunkTable::HolderIndex index = 0;  // holder in the table of the node's namespace
    bool is_partial = false;  // chunks were dropped for lack of room, so the node's digests may differ from the index
  };
  struct Node {
    NodeInfo info;
    Namespace* home = nullptr;
    Generation seen;                   // chunks that lookups see
    std::optional<Generation> next{};  // the unfinished snapshot; it shares the index of `seen` if `seen` was empty
    TimeNs snapshot_begun_at = 0;      // time at which the node's last snapshot began
    TimeNs heard_at = 0;
    std::uint64_t next_sequence = 0;  // messages with lower numbers were applied, or a snapshot replaced them
    // The node has used all lower numbers; if this is above next_sequence, messages are missing.
    std::uint64_t heard_below = 0;
    bool owes_snapshot = true;         // a snapshot of the node is needed and has not ended
    bool is_reloaded = false;          // reloaded after a restart, and no heartbeat or snapshot has confirmed it yet
    std::optional<TimeNs> asked_at{};  // time of the last repair request, or of the last message that answers it
    unsigned num_differed = 0;         // number of consecutive comparisons with differing digests
    std::size_t num_counted = 0;       // number of this node's chunks that are counted in num_chunks_
    bool is_leaving = false;
    std::uint64_t load = 0;  // requests on the node, as it last reported
    TimeNs load_reported_at = 0;
    std::int64_t clock_ahead_ms = 0;       // how far the node's clock is ahead, see NodeStatus
    std::shared_ptr<NodeReport> report{};  // the node's last report; nullptr: none
    TimeNs reported_at = 0;

    bool has_gap() const { return heard_below > next_sequence; }
    /// Returns true if the node's chunks are known to be up to date.
    bool is_confirmed() const { return !owes_snapshot && !has_gap() && !is_reloaded; }
    bool needs_snapshot() const { return owes_snapshot && !next; }
  };

  explicit Directory(DirectoryOptions options = {}) : options_(options) {}
  /// `journal` receives each change of the nodes and their chunks from now on; nullptr: no journal.
  void set_journal(Journal* journal) { journal_ = journal; }
  const Journal* journal() const { return journal_; }

  /// Registers a node, identified by (namespace, engine id). If the same incarnation is registered already, it keeps
  /// its chunks; a newer incarnation replaces an older one at once. kRefused: the fingerprint differs from that of the
  /// namespace's other nodes or of the same incarnation, a newer incarnation is registered, or another process has
  /// registered the same incarnation. kInvalidArgument: a field is too long, not printable, or empty although it is
  /// required. kFull: nodes_max nodes are registered, and this one replaces none of them.
  Result<Joined> join(const NodeInfo& info, std::uint64_t next_sequence, TimeNs now);

  /// Handles a heartbeat. `next_sequence`: number of the node's next publish or evict, which shows whether the node's
  /// last message was lost.
  /// `digests`: digest of the node's chunks in each tier at that number; ignored unless there are kNumTiers. If the
  /// digests differ from the index although no message is missing and no chunk was dropped for lack of room, the node
  /// must send a snapshot. If the digests still differ after that, the wait before the next snapshot doubles, up to
  /// about a minute.
  Update heartbeat(NodeId node, std::uint64_t next_sequence, TimeNs now, std::span<const TierDigest> digests = {});
  Update publish(NodeId node, std::uint64_t sequence, SnapshotMark mark, std::span<const ChunkEntry> chunks, TimeNs now,
                 Tier tier = Tier::kHost);
  /// Removes the keys from all tiers.
  Update evict(NodeId node, std::uint64_t sequence, std::span<const ChunkKey> keys, TimeNs now);
  /// Removes the node. Returns false for an unknown node.
  bool leave(NodeId node);

  /// Returns the nodes that hold keys[0] or a requested tail of the query, without the node that asks, at most
  /// holders_per_reply_max. Nodes that are leaving come after all others. Within each of these two groups, nodes with
  /// more full chunks come first; among nodes with equally many, the node whose last message is newest comes first.
  /// kNotFound: the node that asks is not registered.
  Result<std::vector<Holder>> lookup(NodeId asker, const LookupQuery& query, TimeNs now);
  /// Same as lookup(), but does not copy. `found` is valid until the next non-const call. Returns false if the node
  /// that asks is not registered.
  bool find_holders(NodeId asker, const LookupView& query, TimeNs now, std::vector<HolderView>& found);
  /// Same as find_holders() above, for callers that are not registered; an unknown namespace has no holders.
  void find_holders(const std::string& name_space, const LookupView& query, std::vector<HolderView>& found);

  /// Removes the nodes whose lease expired and returns them. The caller must call expire() many times within lease_ms,
  /// each time after it has handled messages. If more than half a lease has passed since the previous call, no lease
  /// ends within grace_ms of this call, because heartbeats may have arrived and not been read. Also drops snapshots
  /// that took longer than snapshot_ms, frees some memory of removed nodes and resizes tables. Takes well below a
  /// millisecond.
  std::vector<NodeId> expire(TimeNs now);

  /// Returns nullptr for an unknown node. The pointer is valid until a node joins or is removed.
  const Node* node(NodeId id) const;
  /// Returns the fingerprint of the live nodes of a namespace, or an empty text if the namespace has no live nodes.
  std::string fingerprint_of(const std::string& name_space) const;

  // ---- for admin commands; directory_admin.cpp ----
  /// Returns nullopt if no such node is registered.
  std::optional<NodeId> find_node(const std::string& name_space, const std::string& engine_id) const;
  std::vector<NodeId> nodes_of(const std::string& name_space) const;
  /// Returns the nodes that hold the key, in no particular order.
  std::vector<NodeId> holders_of(const std::string& name_space, const ChunkKey& key) const;
  /// Returns the entries of those `keys` that `node` holds.
  std::vector<ChunkEntry> entries_of(NodeId node, std::span<const ChunkKey> keys) const;
  /// Makes repair() request a snapshot from the node, unless a snapshot of the node has begun and not ended.
  void want_snapshot(NodeId node);
  /// Marks the node as leaving or not leaving. Lookups rank leaving nodes last.
  void set_leaving(NodeId node, bool is_leaving);
  /// Limits the number of chunks of a namespace. Chunks above the limit are not removed, but no more are added. nullopt
  /// removes the limit.
  void set_quota(const std::string& name_space, std::optional<std::size_t> chunks_max);
  const std::map<std::string, std::size_t>& quotas() const { return quotas_; }

  void set_load(NodeId node, std::uint64_t num_requests, TimeNs now);
  void set_clock_ahead(NodeId node, std::int64_t ahead_ms);
  void set_report(NodeId node, NodeReport report, TimeNs now);

  /// Returns the messages or the snapshot to request from the node; all fields are 0 for an unknown node.
  Repair repair(NodeId node) const;
  std::vector<NodeStatus> status(TimeNs now) const;
  /// Returns the nodes whose lease expired in the last ten minutes and that have not joined again, at most 64 of them,
  /// the last lost first.
  std::vector<LostNode> lost(TimeNs now) const;
  /// The pointers are valid until a node joins or is removed.
  std::vector<std::pair<NodeId, const NodeInfo*>> nodes() const;
  /// Returns the sequence number below which the node's messages outlive this process (see Journal) or, without a
  /// journal, were applied; 0 for an unknown node.
  std::uint64_t kept_below(NodeId node) const;
  std::size_t num_nodes() const { return nodes_.size(); }
  /// Returns the number of chunks of all nodes. For a node with an unfinished snapshot, the larger of its old and new
  /// number counts.
  std::size_t num_chunks() const { return num_chunks_; }
  std::uint64_t num_chunks_dropped() const { return num_chunks_dropped_; }
  std::uint64_t num_digests_differed() const { return num_digests_differed_; }
  /// Increases with each change of the nodes' chunks or of the set of leaving nodes.
  std::uint64_t index_version() const { return index_version_; }

 private:
  friend class DirectoryState;  // saves and reloads a directory
  struct Namespace {
    std::string fingerprint;
    ChunkTable table;
    std::map<std::string, NodeId> nodes;                                // [engine id] id of the node
    std::unordered_map<ChunkTable::HolderIndex, const Node*> by_index;  // [holder index in `table`] node
    std::size_t num_chunks = 0;  // chunks of all `nodes` together, as counted for limits: the sum of Node::num_counted
  };

  struct Lost {
    NodeStatus status;
    TimeNs at = 0;
  };

  Node* find(NodeId id);
  NodeStatus status_of(const Node& node, TimeNs now) const;
  void lose(const Node& node, TimeNs now);
  std::size_t room_for(const Node& node, std::size_t num_held) const;
  /// Returns true if the caller must apply the message. Returns false if the message is old or follows a loss.
  /// `voids_before`: the message begins a snapshot, so it is applied even after a loss.
  bool accept(Node& node, std::uint64_t sequence, bool voids_before);
  Update ask(Node& node, TimeNs now);
  template <class Change>
  void change(Node& node, const Change& change_generation);
  void record_published(const Node& node, NodeId id, std::uint64_t sequence, SnapshotMark mark, Tier tier,
                        std::span<const ChunkEntry> chunks, bool is_partial);
  void begin_snapshot(Node& node, TimeNs now);
  void end_snapshot(Node& node);
  void drop_snapshot(Node& node);
  void recount(Node& node);
  void remove(NodeId id);
  void tidy();
  void find_holders(Namespace& home, const LookupView& query, std::optional<ChunkTable::HolderIndex> asker,
                    std::vector<HolderView>& found);

  DirectoryOptions options_;
  Journal* journal_ = nullptr;
  bool is_reloading_ = false;  // true during a reload, when the limits on the number of chunks do not apply
  std::map<std::string, std::unique_ptr<Namespace>> namespaces_;
  std::unordered_map<NodeId, std::unique_ptr<Node>> nodes_;
  std::uint64_t last_node_id_ = 0;
  std::size_t num_chunks_ = 0;
  std::uint64_t num_chunks_dropped_ = 0;
  std::uint64_t num_digests_differed_ = 0;
  std::uint64_t index_version_ = 0;
  std::map<std::string, std::size_t> quotas_;  // [namespace] quota; the namespace may have no nodes
  std::string tidied_last_;                    // namespace that tidy() worked on last
  std::vector<ChunkTable::Match> matches_;     // matches of the last lookup
  std::vector<HolderView> found_;              // holders found by the last lookup()
  std::optional<TimeNs> expire_called_at_;
  std::deque<Lost> lost_;  // lost nodes, the last lost first
};

}  // namespace kvferry::controller
