// Announced pushes (announced_pushes.h): leases and pulls the chunks that a prefill node announces.
#include <utility>

#include "connector/core/promises.h"
#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry {

void SchedulerCore::push_settled(const PushSettlement& settlement, TimeNs now) {
  now_ = now;
  if (!announced_.settled(settlement)) return receiver_.settled(settlement);
  advance_announced(now);
}

/// Sends a lease request for the announced chunks of each push that has no such request in progress. The request names
/// chunks that are in the pool by now too, so that the prefill node learns that this node needs nothing more of them.
void SchedulerCore::advance_announced(TimeNs now) {
  for (auto& [id, push] : announced_.pushes()) {
    if (!push.asked.empty() || push.complete.empty()) continue;
    if (!suspects_.allows(push.endpoint, now) || provenance_.is_purged(givers_of(push.endpoint, push.member))) {
      push.complete.clear();
      continue;
    }
    RequestLease lease{++last_id_, push.endpoint, {config_.fingerprint, {}, {}}};
    lease.request.push = push.push;
    lease.request.is_sure_of_frames = frame_holders_.contains(push.endpoint);
    push.asked = std::exchange(push.complete, {});
    for (const ChunkMeta& chunk : push.asked) lease.request.keys.push_back(chunk.key);
    push.fetch = lease.fetch;
    push.try_deadline = now + config_.try_timeout;
    suspects_.asked(push.endpoint, now);
    actions_.push_back(std::move(lease));
  }
  announced_.erase_ended(now);
}

void SchedulerCore::announced_lease_answered(AnnouncedPushes::Push& push, const LeaseReply& reply, TimeNs now) {
  const std::vector<ChunkMeta> asked = std::exchange(push.asked, {});
  const StartPull* pull = start_pull({}, push.endpoint, push.member, asked, reply, now, true);
  if (reply.chunks.empty()) suspects_.had_nothing(push.endpoint);
  if (pull == nullptr && reply.lease != 0) actions_.push_back(ReleaseLease{push.endpoint, reply.lease});
  advance_announced(now);
}

void SchedulerCore::tick_announced(TimeNs now) {
  for (auto& [id, push] : announced_.pushes()) {
    if (push.asked.empty() || push.try_deadline > now) continue;
    counters_.fetch_timeouts += 1;
    suspect(push.endpoint, now);
    push.asked.clear();
  }
  advance_announced(now);
}

}  // namespace kvferry
