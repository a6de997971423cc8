// Requests of other nodes: leases on chunks of this node's pool, and pushes (push_sender.h, push_receiver.h).
#include <utility>

#include "connector/core/scheduler/scheduler_core.h"
#include "transport/base/fingerprint.h"

namespace kvferry {

LeaseReply SchedulerCore::lease_requested(const std::string& from, const LeaseRequest& request, TimeNs now) {
  LeaseReply reply;
  if (request.fingerprint != config_.fingerprint) {
    reply.refused =
        "different models on the two sides: " + fingerprint_difference(config_.fingerprint, request.fingerprint);
    return reply;
  }
  std::vector<ChunkRef> chunks;
  for (std::uint32_t i = 0; i < request.keys.size(); ++i) {
    const ChunkPool::Slot* slot = pool_.find(request.keys[i]);
    if (slot == nullptr || slot->state != ChunkPool::State::kReady) continue;
    chunks.push_back(slot->ref);
    reply.chunks.push_back({i, slot->ref, slot->meta.num_tokens, slot->checksums, slot->meta.window_from});
  }
  if (chunks.empty()) return reply;
  pool_.touch(chunks);
  reply.lease = next_lease_++;
  const PinId pin = pool_.pin(std::move(chunks), "lease of " + from, now, now + config_.lease_ttl);
  leases_[reply.lease] = GrantedLease{pin, request.handoff_request};
  counters_.leases_granted += 1;
  return reply;
}

void SchedulerCore::lease_released(std::uint64_t lease) {
  const auto found = leases_.find(lease);
  if (found == leases_.end()) return;    // expired, released before, or of an earlier incarnation
  unpin_handoff(found->second.handoff);  // the decode worker has the prompt
  pool_.unpin(found->second.pin);
  leases_.erase(found);
}

// ---- pushes ----
void SchedulerCore::push_answered(std::uint64_t push, const std::string& endpoint, const PushReply& reply, TimeNs now) {
  now_ = now;
  if (!reply.refused.empty())
    actions_.push_back(LogLine{fmt::format("{} refuses pushes: {}", endpoint, reply.refused), true});
  sender_.answered(push, endpoint, reply, now);
}

PushReply SchedulerCore::push_offered(const std::string& from, const PushOffer& offer, TimeNs now) {
  now_ = now;
  PushReply reply = receiver_.offered(from, offer, now);
  announce_evictions();
  return reply;
}

void SchedulerCore::push_revoked(const Revocation& answer, TimeNs now) {
  now_ = now;
  for (const ChunkRef chunk : receiver_.revoked(answer)) publish(chunk);
}

}  // namespace kvferry
