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

#include "controller/index/chunk_table.h"
#include "controller/api/client.h"
#include "controller/directory/journal.h"
#include "controller/protocol/node_id.h"
#include "controller/protocol/snapshot_mark.h"
#include "controller/api/status.h"
#include "transport/base/clock.h"
#include "transport/base/ids.h"
#include "transport/base/result.h"

namespace kvferry::controller {

struct DirectoryOptions {
  std::int64_t lease_ms = 2500;        // a node without a word for so long is forgotten; five heartbeats
  std::int64_t grace_ms = 1000;        // what every node gets after expire() itself was late: two heartbeats
  std::int64_t snapshot_ms = 10'000;   // one that takes longer from its begin to its end is dropped
  std::int64_t repair_retry_ms = 200;  // at least, between two wishes to the same node
  std::size_t nodes_max = 4096;
  std::size_t chunks_per_node_max = std::size_t{1} << 20;
  std::size_t chunks_max = std::size_t{1} << 24;  // (node, tier, chunk) over all nodes
  std::size_t tails_per_group_max = 256;
  std::size_t holders_per_reply_max = 64;
  IndexOptions index{};  // of each namespace's table; `seed` should come from the system's randomness
};

enum class Update {
  kApplied,       // or dropped: it is old, or comes after a loss that was asked about already
  kUnknownNode,   // nothing happened: the sender must register
  kRepairWanted,  // something of this node is missing: ask it as repair() says
};

/// What to ask of a node.
struct Repair {
  std::uint64_t heard_below = 0;  // the controller heard of all lower numbers
  std::uint64_t resend_from = 0;  // the first of them that is missing
  bool resend_will_do = false;    // false: only a snapshot helps that begins at resend_from or later
};

struct Joined {
  NodeId id;
  bool snapshot_wanted = false;
  bool resend_wanted = false;    // not both: ask it as repair() says
  std::optional<NodeId> fenced;  // the older incarnation that this one replaced
};

/// A Holder where the directory has it, until its next call that isn't const.
struct FoundHolder {
  const NodeInfo* info = nullptr;
  std::uint32_t num_full_chunks = 0;
  std::span<const ChunkEntry> tails;
  Tier tier = Tier::kHost;
  bool confirmed = true;
  TimeNs heard_at = 0;
  bool is_leaving = false;
};

/// What is known of a node is what it told up to some number, whole and in order: its messages are numbered from the
/// number it joins with, a lower number than expected is an old message, and a higher one shows a loss and waits for
/// being sent again, because an eviction applied before a publish that was lost would be undone by it. A snapshot's
/// begin voids all before it, so it may come after a loss. It is filled in unseen and takes the place of the older
/// knowledge at its end, in one step; what is told meanwhile counts in both. One that ends too late, or is begun anew,
/// leaves nothing behind. A node that dies or leaves is invisible at once; no call takes longer for what it held.
/// Threads: one at a time. `now` must never go back.
class Directory {
 public:
  explicit Directory(DirectoryOptions options = {}) : options_(options) {}
  /// Is told of each change from here on, until it is unset; nullptr: nobody.
  void set_journal(Journal* journal) { journal_ = journal; }
  const Journal* journal() const { return journal_; }

  /// A node is known by (namespace, engine id). The same incarnation again keeps what it held (its connection broke); a
  /// newer one replaces the older at once.
  /// kRefused: another fingerprint than the namespace's living nodes, or a newer incarnation is registered.
  /// kInvalidArgument: a field is empty, too long or not printable. kFull: nodes_max.
  Result<Joined> join(const NodeInfo& info, std::uint64_t next_sequence, TimeNs now);

  /// `next_sequence`: the number that the node's next publish or evict will have; shows that its last one was lost.
  /// `digests`: of what it holds then, by tier; if they are another number's than kNumTiers, they are not compared. A
  /// difference where nothing is missing is a loss that nobody saw: the node owes a snapshot. If that does not help,
  /// the wait before the next doubles, up to about a minute.
  Update heartbeat(NodeId node, std::uint64_t next_sequence, TimeNs now, std::span<const TierDigest> digests = {});
  Update publish(NodeId node, std::uint64_t sequence, SnapshotMark mark, std::span<const ChunkEntry> chunks, TimeNs now,
                 Tier tier = Tier::kHost);
  /// From all tiers.
  Update evict(NodeId node, std::uint64_t sequence, std::span<const ChunkKey> keys, TimeNs now);
  /// False: no such node.
  bool leave(NodeId node);

  /// Best first: most full chunks, then most recently heard of; at most holders_per_reply_max; never the asker.
  /// kNotFound: the asker is not registered.
  Result<std::vector<Holder>> lookup(NodeId asker, const LookupQuery& query, TimeNs now);
  /// The same without copies, into `found`. False: the asker is not registered.
  bool find_holders(NodeId asker, const LookupView& query, TimeNs now, std::vector<FoundHolder>& found);

  /// Forgets nodes whose lease ran out and returns them. To be called much more often than lease_ms, with all waiting
  /// messages taken in before: a call that comes later than half a lease after the one before gives all nodes
  /// grace_ms, because then nobody knows whether they or the caller were silent. Also tidies a bit: of what the dead
  /// left behind, and of growing tables; well below a millisecond.
  std::vector<NodeId> expire(TimeNs now);

  /// The same for one who is no node; nobody is in a namespace that isn't there.
  void find_holders(const std::string& name_space, const LookupView& query, std::vector<FoundHolder>& found);
  /// Of the living nodes of a namespace; empty: there are none.
  std::string fingerprint_of(const std::string& name_space) const;

  // ---- what admin commands need to know and to set; directory_rules.cpp ----
  /// nullopt: no such node is registered.
  std::optional<NodeId> find_node(const std::string& name_space, const std::string& engine_id) const;
  /// nullptr: it is gone. Valid until nodes change.
  const NodeInfo* info(NodeId node) const;
  std::vector<NodeId> nodes_of(const std::string& name_space) const;
  /// Who can be asked for it; in no particular order.
  std::vector<NodeId> holders_of(const std::string& name_space, const ChunkKey& key) const;
  /// Those of `keys` that `node` holds, with what a tail's message must say.
  std::vector<ChunkEntry> entries_of(NodeId node, std::span<const ChunkKey> keys) const;
  std::size_t num_chunks_of(NodeId node) const;
  /// Nothing that it told is missing.
  bool is_confirmed(NodeId node) const;
  /// The node owes a snapshot: all that it holds, told again.
  void want_snapshot(NodeId node);
  /// A leaving node comes last in look-ups' answers, until it is gone or said to stay.
  void set_leaving(NodeId node, bool is_leaving);
  bool is_leaving(NodeId node) const;
  /// A namespace keeps at most so many chunks; what is beyond at the time stays. nullopt: as many as all may.
  void set_quota(const std::string& name_space, std::optional<std::size_t> chunks_max);
  const std::map<std::string, std::size_t>& quotas() const { return quotas_; }

  /// What it told last, and when; of a node that is not known, or told none yet: zeros.
  struct Load {
    std::uint64_t num_requests = 0;
    TimeNs told_at = 0;
  };
  Load load(NodeId node) const;
  void set_load(NodeId node, std::uint64_t num_requests, TimeNs now);

  /// Of a node that is not known: zeros.
  Repair repair(NodeId node) const;
  std::vector<NodeStatus> status(TimeNs now) const;
  /// Valid until nodes change.
  std::vector<std::pair<NodeId, const NodeInfo*>> nodes() const;
  /// The node's messages below this number outlive the process, or, where there is no journal, were applied; see
  /// Journal. Of a node that is not known: 0.
  std::uint64_t kept_below(NodeId node) const;
  std::size_t num_nodes() const { return nodes_.size(); }
  /// Of a node with a snapshot under way, the larger of what it held and what came so far.
  std::size_t num_chunks() const { return num_chunks_; }
  std::uint64_t num_chunks_dropped() const { return num_chunks_dropped_; }
  std::uint64_t num_digests_differed() const { return num_digests_differed_; }
  /// Grows with each change of what a look-up may answer.
  std::uint64_t index_version() const { return index_version_; }

 private:
  friend class DirectoryState;  // what outlives a process
  struct Node;
  struct Namespace {
    std::string fingerprint;
    ChunkTable table;
    std::map<std::string, NodeId> nodes;                                // by engine id
    std::unordered_map<ChunkTable::HolderIndex, const Node*> by_index;  // of `table`
    std::size_t num_chunks = 0;                                         // as num_chunks_, of its nodes
  };
  /// What a node held since some snapshot of it.
  struct Generation {
    ChunkTable::HolderIndex index = 0;  // in home->table
    bool is_partial = false;            // there was no room for all, so its digest is another one
  };
  struct Node {
    NodeInfo info;
    Namespace* home = nullptr;
    Generation seen;                   // by look-ups
    std::optional<Generation> next{};  // of a snapshot under way; the seen one where that began empty
    TimeNs snapshot_begun_at = 0;      // of `next`
    TimeNs heard_at = 0;
    std::uint64_t next_sequence = 0;   // all before it was applied
    std::uint64_t heard_below = 0;     // never less; if more, messages are missing
    bool owes_snapshot = true;         // until one ends
    bool is_reloaded = false;          // known from before a restart, and not yet heard to be still so
    std::optional<TimeNs> asked_at{};  // for what is missing; also when a part of it came
    unsigned num_differed = 0;         // comparisons of digests in a row
    std::size_t num_counted = 0;       // in num_chunks_
    bool is_leaving = false;
    Load load{};

    bool has_gap() const { return heard_below > next_sequence; }
    bool is_confirmed() const { return !owes_snapshot && !has_gap() && !is_reloaded; }
    bool needs_snapshot() const { return owes_snapshot && !next; }
  };

  Node* find(NodeId id);
  const Node* find(NodeId id) const;
  std::size_t room_for(const Node& node, std::size_t num_held) const;
  bool accept(Node& node, std::uint64_t sequence, bool voids_before);
  Update ask(Node& node, TimeNs now);
  template <class Change>
  void change(Node& node, const Change& change_generation);
  void tell_published(const Node& node, NodeId id, std::uint64_t sequence, SnapshotMark mark, Tier tier,
                      std::span<const ChunkEntry> chunks, bool is_partial);
  void begin_snapshot(Node& node, TimeNs now);
  void end_snapshot(Node& node);
  void drop_snapshot(Node& node);
  void count_again(Node& node);
  void forget(NodeId id);
  void tidy();
  void find_holders(Namespace& home, const LookupView& query, std::optional<ChunkTable::HolderIndex> asker,
                    std::vector<FoundHolder>& found);

  DirectoryOptions options_;
  Journal* journal_ = nullptr;
  bool is_reloading_ = false;  // what was kept once has room
  std::map<std::string, std::unique_ptr<Namespace>> namespaces_;
  std::unordered_map<NodeId, std::unique_ptr<Node>> nodes_;
  std::uint64_t last_node_id_ = 0;
  std::size_t num_chunks_ = 0;
  std::uint64_t num_chunks_dropped_ = 0;
  std::uint64_t num_digests_differed_ = 0;
  std::uint64_t index_version_ = 0;
  std::map<std::string, std::size_t> quotas_;  // by namespace, also of one that has no nodes
  std::string tidied_last_;                    // a namespace
  std::vector<ChunkTable::Match> matches_;     // of the last look-up
  std::vector<FoundHolder> found_;             // of the last one that was copied
  std::optional<TimeNs> expire_called_at_;
};

}  // namespace kvferry::controller
