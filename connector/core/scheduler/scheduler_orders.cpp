// The controller's orders for this pool: pin, unpin, evict, replicate.
#include <algorithm>
#include <utility>

#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry {
namespace {

// Largest number of chunks in one pull of a replication. It is small, so that a replication delays the pulls of
// requests only a little.
constexpr std::size_t kChunksPerPiece = 32;

}  // namespace

void SchedulerCore::pin_ordered(std::uint64_t id, std::span<const ChunkKey> keys, TimeNs ttl, TimeNs now) {
  if (ttl <= 0) return;
  // At most half of the pool is pinned for the controller; the rest is left for requests.
  const std::size_t num_allowed = config_.num_slots / 2;
  std::vector<ChunkRef> chunks;
  std::size_t num_refused = 0;
  for (const ChunkKey& key : keys) {
    const ChunkPool::Slot* slot = pool_.find(key);
    if (slot == nullptr || slot->state != ChunkPool::State::kReady) continue;
    if (num_controller_pinned_ + chunks.size() < num_allowed)
      chunks.push_back(slot->ref);
    else
      ++num_refused;
  }
  if (num_refused > 0) {
    counters_.pins_refused += num_refused;
    actions_.push_back(
        LogLine{fmt::format("{} of {} chunks that the controller ordered to pin are not pinned: at most half of "
                            "the pool's {} slots can be pinned for the controller",
                            num_refused, keys.size(), config_.num_slots),
                true});
  }
  if (chunks.empty()) return;
  num_controller_pinned_ += chunks.size();
  const std::size_t num_chunks = chunks.size();
  const TimeNs deadline = now + std::min(ttl, config_.order_ttl_max);
  const PinId pin = pool_.pin(std::move(chunks), fmt::format("pin {} of the controller", id), now, deadline);
  controller_pins_[id].push_back({pin, num_chunks});
}

void SchedulerCore::unpin_ordered(std::uint64_t id) {
  const auto found = controller_pins_.find(id);
  if (found == controller_pins_.end()) return;  // the pins have expired, or the id is unknown
  for (const ControllerPin& entry : found->second) {
    pool_.unpin(entry.pin);
    num_controller_pinned_ -= entry.num_chunks;
  }
  controller_pins_.erase(found);
}

void SchedulerCore::evict_ordered(std::span<const ChunkKey> keys) {
  for (const ChunkKey& key : keys) {
    const ChunkPool::Slot* slot = pool_.find(key);
    if (slot != nullptr && slot->state == ChunkPool::State::kReady) pool_.invalidate(slot->ref);
  }
  announce_evictions();
}

void SchedulerCore::replicate_ordered(ReplicateOrder order, TimeNs now) {
  if (order.ttl <= 0 || order.chunks.empty()) return;
  Replication replication{
      .endpoint = std::move(order.endpoint),
      .remaining = {std::make_move_iterator(order.chunks.begin()), std::make_move_iterator(order.chunks.end())},
      .deadline = now + std::min(order.ttl, config_.order_ttl_max),
      .member = std::move(order.member),
      .piece = {}};
  for (ChunkMeta& chunk : replication.remaining)
    if (!chunk.is_tail) chunk.num_tokens = config_.chunk_tokens;
  const auto is_impossible = [&](const ChunkMeta& chunk) { return !chunk.has_possible_length(config_.chunk_tokens); };
  counters_.mislabeled_chunks += std::erase_if(replication.remaining, is_impossible);
  replications_.push_back(std::move(replication));
  advance_replications(now);
}

/// Requests the next piece of the first replication, if no piece is in progress. Only one piece of all orders is in
/// progress at a time, which leaves room for the fetches of requests. A piece whose pull is overdue is in progress
/// until all ranks have reported its end.
void SchedulerCore::advance_replications(TimeNs now) {
  const bool is_pulling = std::ranges::any_of(
      pulls_, [](const auto& pull) { return pull.second.request.value.empty() && !pull.second.is_announced; });
  while (!replications_.empty() && replications_.front().piece.empty()) {
    Replication& replication = replications_.front();
    const bool has_ended = now >= replication.deadline || !suspects_.allows(replication.endpoint, now) ||
                           provenance_.is_purged(givers_of(replication.endpoint, replication.member));
    if (is_pulling && !has_ended) return;
    RequestLease lease{0, replication.endpoint, {config_.fingerprint, {}, {}}};
    while (!has_ended && !replication.remaining.empty() && replication.piece.size() < kChunksPerPiece) {
      const ChunkMeta chunk = replication.remaining.front();
      replication.remaining.pop_front();
      if (pool_.find(chunk.key) != nullptr) continue;
      lease.request.keys.push_back(chunk.key);
      replication.piece.push_back(chunk);
    }
    if (replication.piece.empty()) {
      replications_.pop_front();
      continue;
    }
    lease.fetch = replication.fetch = ++last_id_;
    replication.pull = 0;
    suspects_.asked(replication.endpoint, now);
    replication.try_deadline = now + config_.try_timeout;
    actions_.push_back(std::move(lease));
  }
}

/// Returns true if the replication in progress waits for the answer to this lease request.
bool SchedulerCore::is_replication_lease(std::uint64_t fetch) const {
  if (replications_.empty()) return false;
  const Replication& replication = replications_.front();
  return !replication.piece.empty() && replication.fetch == fetch && replication.pull == 0;
}

void SchedulerCore::replication_lease_answered(const LeaseReply& reply, TimeNs now) {
  Replication& replication = replications_.front();
  const StartPull* pull = start_pull({}, replication.endpoint, replication.member, replication.piece, reply, now);
  if (pull == nullptr) {
    suspects_.had_nothing(replication.endpoint);
    if (reply.lease != 0) actions_.push_back(ReleaseLease{replication.endpoint, reply.lease});
    return end_replication_piece(replication.pull, now);
  }
  replication.pull = pull->pull;
  replication.try_deadline = pull->deadline + config_.try_timeout;
}

/// Called when a piece has ended. `pull`: the piece's Replication::pull; the order may have ended before its overdue
/// pull.
void SchedulerCore::end_replication_piece(std::uint64_t pull, TimeNs now) {
  if (!replications_.empty() && replications_.front().pull == pull) replications_.front().piece.clear();
  advance_replications(now);
}

void SchedulerCore::tick_orders(TimeNs now) {
  for (auto it = controller_pins_.begin(); it != controller_pins_.end();) {
    std::erase_if(it->second, [&](const ControllerPin& entry) {
      const bool has_ended = !pool_.pinned(entry.pin);
      if (has_ended) num_controller_pinned_ -= entry.num_chunks;
      return has_ended;
    });
    it = it->second.empty() ? controller_pins_.erase(it) : std::next(it);
  }
  if (replications_.empty()) return;
  Replication& replication = replications_.front();
  if (!replication.piece.empty() && now >= replication.try_deadline) {
    counters_.fetch_timeouts += 1;
    if (replication.pull == 0) suspect(replication.endpoint, now);
    replication.piece.clear();
  }
  advance_replications(now);
}

}  // namespace kvferry
