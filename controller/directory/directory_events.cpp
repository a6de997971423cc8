// The part of Directory that applies the nodes' messages: ordering, repair of losses, comparison of digests.
#include <algorithm>

#include "controller/directory/directory.h"

namespace kvferry::controller {
namespace {

constexpr unsigned kRepairDoublingsMax = 8;  // limit on how often repair_retry_ms doubles

}  // namespace

Update Directory::heartbeat(NodeId id, std::uint64_t next_sequence, TimeNs now, std::span<const TierDigest> digests) {
  Node* node = find(id);
  if (node == nullptr) return Update::kUnknownNode;
  node->heard_at = now;
  node->heard_below = std::max(node->heard_below, next_sequence);
  const bool is_whole = next_sequence == node->next_sequence && !node->owes_snapshot && !node->has_gap();
  const bool is_comparable = is_whole && digests.size() == kNumTiers && !node->seen.is_partial;
  if (is_comparable && std::ranges::equal(digests, node->home->table.digests(node->seen.index))) {
    node->num_differed = 0;
  } else if (is_comparable) {
    node->owes_snapshot = true;
    ++node->num_differed;
    ++num_digests_differed_;
  }
  if (is_whole && !node->owes_snapshot) node->is_reloaded = false;
  return ask(*node, now);
}

Update Directory::publish(NodeId id, std::uint64_t sequence, SnapshotMark mark, std::span<const ChunkEntry> chunks,
                          TimeNs now, Tier tier) {
  Node* node = find(id);
  if (node == nullptr) return Update::kUnknownNode;
  node->heard_at = now;
  const bool voids_before = mark == SnapshotMark::kReplaces || mark == SnapshotMark::kBegins;
  if (!accept(*node, sequence, voids_before)) return ask(*node, now);
  if (voids_before) begin_snapshot(*node, now);
  if (mark == SnapshotMark::kReplaces) end_snapshot(*node);
  ChunkTable& table = node->home->table;
  std::size_t num_dropped = 0;
  change(*node, [&](Generation& generation) {
    const std::size_t num_held = table.num_chunks(generation.index);
    const std::size_t room = room_for(*node, num_held);
    const ChunkTable::Added added = table.add(generation.index, tier, chunks, is_reloading_ ? chunks.size() : room);
    num_dropped += added.num_dropped;
    if (added.num_dropped > 0) generation.is_partial = true;
  });
  num_chunks_dropped_ += num_dropped;
  if (journal_ != nullptr) record_published(*node, id, sequence, mark, tier, chunks, num_dropped > 0);
  if (mark == SnapshotMark::kEnds && node->next) end_snapshot(*node);
  return Update::kApplied;
}

Update Directory::evict(NodeId id, std::uint64_t sequence, std::span<const ChunkKey> keys, TimeNs now) {
  Node* node = find(id);
  if (node == nullptr) return Update::kUnknownNode;
  node->heard_at = now;
  if (!accept(*node, sequence, false)) return ask(*node, now);
  change(*node, [&](Generation& generation) { node->home->table.remove(generation.index, keys); });
  if (journal_ != nullptr) journal_->evicted(id, sequence, keys);
  return Update::kApplied;
}

void Directory::record_published(const Node& node, NodeId id, std::uint64_t sequence, SnapshotMark mark, Tier tier,
                                 std::span<const ChunkEntry> chunks, bool is_partial) {
  if (!is_partial) return journal_->published(id, sequence, mark, tier, chunks, false);
  std::vector<ChunkEntry> kept;
  const ChunkTable& table = node.home->table;
  for (const ChunkEntry& chunk : chunks) {
    if (table.holds(node.seen.index, tier, chunk.key) || (node.next && table.holds(node.next->index, tier, chunk.key)))
      kept.push_back(chunk);
  }
  journal_->published(id, sequence, mark, tier, kept, true);
}

Repair Directory::repair(NodeId id) const {
  const Node* known = node(id);
  if (known == nullptr) return {};
  return {known->heard_below, known->next_sequence, !known->needs_snapshot()};
}

bool Directory::accept(Node& node, std::uint64_t sequence, bool voids_before) {
  if (sequence < node.next_sequence) return false;
  node.heard_below = std::max(node.heard_below, sequence + 1);
  if (sequence > node.next_sequence && !voids_before) return false;
  node.next_sequence = sequence + 1;
  // While the repair's messages arrive, the repair need not be requested again.
  if (node.asked_at) node.asked_at = node.heard_at;
  if (!node.has_gap()) node.asked_at.reset();
  return true;
}

Update Directory::ask(Node& node, TimeNs now) {
  const TimeNs retry = options_.repair_retry_ms * kMillisecond;
  if (!node.has_gap() && !node.needs_snapshot()) return Update::kApplied;
  if (node.asked_at && now - *node.asked_at < retry) return Update::kApplied;
  // If snapshots do not make the digests equal, the node must not spend all its time on sending snapshots.
  const bool is_hopeless = node.num_differed > 1 && !node.has_gap();
  if (is_hopeless && now - node.snapshot_begun_at < retry << std::min(node.num_differed, kRepairDoublingsMax))
    return Update::kApplied;
  node.asked_at = now;
  return Update::kRepairWanted;
}

/// Applies a change to the chunks that lookups see and, if there is one, to the unfinished snapshot, because the node's
/// messages count for both.
template <class Change>
void Directory::change(Node& node, const Change& change_generation) {
  if (node.next && node.next->index == node.seen.index) {
    change_generation(*node.next);
  } else {
    change_generation(node.seen);
    recount(node);
    if (node.next) change_generation(*node.next);
  }
  recount(node);
  ++index_version_;
}

void Directory::begin_snapshot(Node& node, TimeNs now) {
  drop_snapshot(node);
  node.owes_snapshot = true;
  node.snapshot_begun_at = now;
  ChunkTable& table = node.home->table;
  const bool is_empty = table.num_chunks(node.seen.index) == 0;
  node.next = Generation{.index = is_empty ? node.seen.index : table.add_hidden_holder()};
}

void Directory::end_snapshot(Node& node) {
  Namespace& home = *node.home;
  if (node.next->index != node.seen.index) {
    home.table.remove_holder(node.seen.index);
    home.by_index.erase(node.seen.index);
    home.table.show_holder(node.next->index);
    home.by_index[node.next->index] = &node;
  }
  node.seen = *node.next;
  node.next.reset();
  node.owes_snapshot = false;
  node.is_reloaded = false;
  recount(node);
  ++index_version_;
}

void Directory::drop_snapshot(Node& node) {
  if (!node.next) return;
  if (node.next->index != node.seen.index) node.home->table.remove_holder(node.next->index);
  node.next.reset();
  recount(node);
}

void Directory::recount(Node& node) {
  const ChunkTable& table = node.home->table;
  const std::size_t num_seen = table.num_chunks(node.seen.index);
  const std::size_t num_held = node.next ? std::max(num_seen, table.num_chunks(node.next->index)) : num_seen;
  num_chunks_ += num_held - node.num_counted;
  node.home->num_chunks += num_held - node.num_counted;
  node.num_counted = num_held;
}

}  // namespace kvferry::controller
