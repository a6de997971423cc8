#include "controller/directory/drains.h"

#include <algorithm>
#include <utility>

namespace kvferry::controller {
namespace {

// Limit on the waiting chunks checked in one call, so that the call stays short.
constexpr std::size_t kChecksPerTurn = 4096;

}  // namespace

bool Drains::published(NodeId node, std::span<const ChunkEntry> chunks, SnapshotMark mark) {
  const auto found = drains_.find(node);
  if (found == drains_.end()) return false;
  Drain& drain = found->second;
  for (const ChunkEntry& chunk : chunks) drain.waiting.push_back({chunk});
  drain.is_listing |= mark == SnapshotMark::kBegins || mark == SnapshotMark::kReplaces;
  const bool has_ended = mark == SnapshotMark::kEnds || mark == SnapshotMark::kReplaces;
  // A snapshot that began before the drain does not count: its first chunks were not added to `waiting`.
  drain.is_listed |= drain.is_listing && has_ended;
  return has_ended && !drain.is_listing;
}

std::vector<Drains::Replication> Drains::advance(const Cluster& cluster, TimeNs now) {
  std::vector<Replication> replications;
  for (auto& [node, drain] : drains_) {
    check_running(node, drain, cluster, now);
    while (!drain.waiting.empty() && drain.running.size() < options_.replications_max) {
      Replication replication = next_replication(node, drain, cluster, now);
      if (replication.chunks.empty()) break;
      replications.push_back(std::move(replication));
    }
  }
  return replications;
}

/// Ends each replication at its deadline, or earlier if the leaving node is no longer the only holder of any of its
/// chunks. Chunks that only the leaving node holds at the deadline are replicated again, up to tries_max times in all.
void Drains::check_running(NodeId node, Drain& drain, const Cluster& cluster, TimeNs now) {
  std::erase_if(drain.running, [&](Running& running) {
    std::erase_if(running.chunks, [&](const ChunkEntry& chunk) {
      const Place place = cluster.place_of(node, chunk.key);
      drain.num_replicated += place == Place::kElsewhere ? 1 : 0;
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

/// Takes the next chunks from the queue, in order, because neighbouring chunks mostly belong to one prefix. Returns no
/// chunks if none of the checked ones needs replication, or if there is no target node.
Drains::Replication Drains::next_replication(NodeId node, Drain& drain, const Cluster& cluster, TimeNs now) {
  Replication replication{node, {}, {}, options_.replication_ttl};
  const std::vector<NodeId> targets = cluster.targets(node);
  unsigned num_tries = 0;
  for (std::size_t i = 0; i < kChecksPerTurn && !drain.waiting.empty(); ++i) {
    const Waiting& next = drain.waiting.front();
    if (!replication.chunks.empty() && next.num_tries != num_tries) break;
    if (cluster.place_of(node, next.chunk.key) == Place::kOnlyThere) {
      if (targets.empty()) return {};  // no target now: the chunks wait until one registers
      num_tries = next.num_tries;
      replication.chunks.push_back(next.chunk);
    }
    drain.waiting.pop_front();
    if (replication.chunks.size() == options_.chunks_per_replication) break;
  }
  if (replication.chunks.empty()) return replication;
  replication.to = targets[drain.next_target++ % targets.size()];
  drain.running.push_back({now + options_.replication_ttl, num_tries + 1, replication.chunks});
  return replication;
}

Drains::Progress Drains::progress(NodeId node) const {
  const auto found = drains_.find(node);
  if (found == drains_.end()) return {};
  const Drain& drain = found->second;
  Progress progress{drain.waiting.size(), drain.num_replicated, drain.num_lost, drain.is_listed};
  for (const Running& running : drain.running) progress.num_left += running.chunks.size();
  return progress;
}

}  // namespace kvferry::controller
