#include "controller/directory/drains.h"

#include <algorithm>
#include <utility>

namespace kvferry::controller {
namespace {

constexpr std::size_t kLooksPerTurn = 4096;  // at chunks that wait, so that a turn stays short

}  // namespace

void Drains::told(NodeId node, std::span<const ChunkEntry> chunks, SnapshotMark mark) {
  const auto found = drains_.find(node);
  if (found == drains_.end()) return;
  Drain& drain = found->second;
  for (const ChunkEntry& chunk : chunks) drain.waiting.push_back({chunk});
  drain.is_telling |= mark == SnapshotMark::kBegins || mark == SnapshotMark::kReplaces;
  // The end of one that began before the drain is not the end of all.
  drain.is_told |= drain.is_telling && (mark == SnapshotMark::kEnds || mark == SnapshotMark::kReplaces);
}

std::vector<Drains::Copy> Drains::advance(const Cluster& cluster, TimeNs now) {
  std::vector<Copy> copies;
  for (auto& [node, drain] : drains_) {
    check_running(node, drain, cluster, now);
    while (!drain.waiting.empty() && drain.running.size() < options_.copies_at_a_time) {
      Copy copy = next_copy(node, drain, cluster, now);
      if (copy.chunks.empty()) break;
      copies.push_back(std::move(copy));
    }
  }
  return copies;
}

/// Copies that have come end; of those that are late, what is missing goes to another target.
void Drains::check_running(NodeId node, Drain& drain, const Cluster& cluster, TimeNs now) {
  std::erase_if(drain.running, [&](Running& running) {
    std::erase_if(running.chunks, [&](const ChunkEntry& chunk) {
      const Place place = cluster.place_of(node, chunk.key);
      drain.num_moved += place == Place::kElsewhere ? 1 : 0;
      return place != Place::kOnlyThere;
    });
    if (!running.chunks.empty() && now < running.deadline) return false;
    for (const ChunkEntry& chunk : running.chunks) {
      if (running.num_tries < options_.tries_max)
        drain.waiting.push_back({chunk, running.num_tries});
      else
        ++drain.num_lost;
    }
    return true;
  });
}

/// Neighbours stay together: they are mostly one prefix's. Empty: nothing to copy for now, or nobody to copy to.
Drains::Copy Drains::next_copy(NodeId node, Drain& drain, const Cluster& cluster, TimeNs now) {
  Copy copy{node, {}, {}, options_.copy_ttl};
  const std::vector<NodeId> targets = cluster.targets(node);
  unsigned num_tries = 0;
  for (std::size_t i = 0; i < kLooksPerTurn && !drain.waiting.empty(); ++i) {
    const Waiting& next = drain.waiting.front();
    if (!copy.chunks.empty() && next.num_tries != num_tries) break;
    if (cluster.place_of(node, next.chunk.key) == Place::kOnlyThere) {
      if (targets.empty()) return {};  // they wait for somebody to come
      num_tries = next.num_tries;
      copy.chunks.push_back(next.chunk);
    }
    drain.waiting.pop_front();
    if (copy.chunks.size() == options_.chunks_per_copy) break;
  }
  if (copy.chunks.empty()) return copy;
  copy.to = targets[drain.next_target++ % targets.size()];
  drain.running.push_back({now + options_.copy_ttl, num_tries + 1, copy.chunks});
  return copy;
}

Drains::Progress Drains::progress(NodeId node) const {
  const auto found = drains_.find(node);
  if (found == drains_.end()) return {};
  const Drain& drain = found->second;
  Progress progress{drain.waiting.size(), drain.num_moved, drain.num_lost, drain.is_told};
  for (const Running& running : drain.running) progress.num_left += running.chunks.size();
  return progress;
}

}  // namespace kvferry::controller
