// What the controller asks of this pool: keep, unkeep, forget, fetch.
#include <algorithm>
#include <utility>

#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry {
namespace {

constexpr std::size_t kChunksPerPiece = 32;  // of a fetch: small, so that requests' own pulls get their turn

}  // namespace

void SchedulerCore::pin_ordered(const PinOrder& order, TimeNs now) {
  if (order.ttl <= 0) return;
  // Whatever is asked, half of the pool stays free for the work at hand.
  const std::size_t num_allowed = config_.num_slots / 2;
  std::vector<ChunkRef> chunks;
  std::size_t num_refused = 0;
  for (const ChunkKey& key : order.keys) {
    const ChunkPool::Slot* slot = pool_.find(key);
    if (slot == nullptr || slot->state != ChunkPool::State::kReady) continue;
    if (num_kept_ + chunks.size() < num_allowed)
      chunks.push_back(slot->ref);
    else
      ++num_refused;
  }
  if (num_refused > 0) {
    counters_.keeps_refused += num_refused;
    actions_.push_back(LogLine{fmt::format("{} of {} chunks that the controller wants kept are not: half of the pool's "
                                           "{} chunks may be kept at a time",
                                           num_refused, order.keys.size(), config_.num_slots),
                               true});
  }
  if (chunks.empty()) return;
  num_kept_ += chunks.size();
  const std::size_t num_chunks = chunks.size();
  const TimeNs ttl = std::min(order.ttl, config_.keep_ttl_max);
  const PinId pin = pool_.pin(std::move(chunks), fmt::format("hold {} of the controller", order.hold), now, now + ttl);
  kept_[order.hold].push_back({pin, num_chunks});
}

void SchedulerCore::unpin_ordered(std::uint64_t hold) {
  const auto found = kept_.find(hold);
  if (found == kept_.end()) return;  // expired, or never here
  for (const Kept& kept : found->second) {
    pool_.unpin(kept.pin);
    num_kept_ -= kept.num_chunks;
  }
  kept_.erase(found);
}

void SchedulerCore::evict_ordered(std::span<const ChunkKey> keys) {
  for (const ChunkKey& key : keys) {
    const ChunkPool::Slot* slot = pool_.find(key);
    if (slot != nullptr && slot->state == ChunkPool::State::kReady) pool_.condemn(slot->ref);
  }
  announce_evictions();
}

void SchedulerCore::replicate_ordered(ReplicateOrder order, TimeNs now) {
  if (order.ttl <= 0 || order.chunks.empty()) return;
  Replication fetch{
      .engine_id = std::move(order.engine_id),
      .endpoint = std::move(order.endpoint),
      .left = {std::make_move_iterator(order.chunks.begin()), std::make_move_iterator(order.chunks.end())},
      .deadline = now + std::min(order.ttl, config_.keep_ttl_max),
      .piece = {}};
  for (ChunkMeta& chunk : fetch.left)
    if (!chunk.is_tail) chunk.num_tokens = config_.chunk_tokens;
  // A slot has room for one chunk, whatever a controller says.
  std::erase_if(fetch.left, [&](const ChunkMeta& chunk) { return chunk.num_tokens > config_.chunk_tokens; });
  ordered_.push_back(std::move(fetch));
  advance_ordered(now);
}

/// One piece at a time over all orders: the fetches of requests come first.
void SchedulerCore::advance_ordered(TimeNs now) {
  while (!ordered_.empty() && ordered_.front().piece.empty()) {
    Replication& fetch = ordered_.front();
    const bool is_over = now >= fetch.deadline || suspect_until_.contains(fetch.endpoint);
    RequestLease lease{0, fetch.engine_id, fetch.endpoint, {config_.fingerprint, {}, {}}};
    while (!is_over && !fetch.left.empty() && fetch.piece.size() < kChunksPerPiece) {
      ChunkMeta chunk = std::move(fetch.left.front());
      fetch.left.pop_front();
      if (pool_.find(chunk.key) != nullptr) continue;
      lease.request.keys.push_back(chunk.key);
      fetch.piece.push_back(std::move(chunk));
    }
    if (fetch.piece.empty()) {
      ordered_.pop_front();
      continue;
    }
    lease.fetch = fetch.fetch = ++last_id_;
    fetch.pull = 0;
    fetch.try_deadline = now + config_.try_timeout;
    actions_.push_back(std::move(lease));
  }
}

/// False: no order waits for this answer.
bool SchedulerCore::ordered_lease_answered(std::uint64_t number, const LeaseReply& reply, TimeNs now) {
  if (ordered_.empty()) return false;
  Replication& fetch = ordered_.front();
  if (fetch.piece.empty() || fetch.fetch != number || fetch.pull != 0) return false;
  const StartPull* pull = start_pull({}, fetch.engine_id, fetch.endpoint, fetch.piece, reply, now);
  if (pull == nullptr) {
    if (reply.lease != 0) actions_.push_back(ReleaseLease{fetch.endpoint, reply.lease});
    end_ordered_piece(now);
    return true;
  }
  fetch.pull = pull->pull;
  fetch.try_deadline = pull->deadline + config_.try_timeout;
  return true;
}

void SchedulerCore::end_ordered_piece(TimeNs now) {
  ordered_.front().piece.clear();
  advance_ordered(now);
}

void SchedulerCore::tick_orders(TimeNs now) {
  for (auto it = kept_.begin(); it != kept_.end();) {
    std::erase_if(it->second, [&](const Kept& kept) {
      const bool is_over = !pool_.pinned(kept.pin);
      if (is_over) num_kept_ -= kept.num_chunks;
      return is_over;
    });
    it = it->second.empty() ? kept_.erase(it) : std::next(it);
  }
  if (ordered_.empty()) return;
  Replication& fetch = ordered_.front();
  if (!fetch.piece.empty() && now >= fetch.try_deadline) {
    counters_.fetch_timeouts += 1;
    if (fetch.pull == 0) suspect_until_[fetch.endpoint] = now + 5 * kSecond;
    fetch.piece.clear();
  }
  advance_ordered(now);
}

}  // namespace kvferry
