// Requests of other nodes: leases on chunks of this node's pool, and pushes (push_sender.h, push_receiver.h).
#include <algorithm>
#include <utility>

#include "connector/core/promises.h"
#include "connector/core/scheduler/scheduler_core.h"
#include "transport/base/fingerprint.h"

namespace kvferry {
namespace {

// Limit on the number of chunks in all leases together, since a peer can request leases without end. The records
// of the pinned chunks then take at most 16 MiB (a ChunkRef has 16 bytes). Chunks beyond the limit are not leased.
constexpr std::size_t kLeasedChunksMax = 1 << 20;

}  // namespace

LeaseReply SchedulerCore::lease_requested(const std::string& from, const LeaseRequest& request, TimeNs now) {
  LeaseReply reply;
  if (request.fingerprint != config_.fingerprint) {
    reply.refused = "the two nodes serve different models (\"here\" is the node that refuses): " +
                    fingerprint_difference(config_.fingerprint, request.fingerprint);
    return reply;
  }
  std::vector<ChunkRef> chunks;
  const std::size_t num_allowed = std::min<std::size_t>(config_.num_slots, kLeasedChunksMax - num_leased_chunks_);
  for (std::uint32_t i = 0; i < request.keys.size() && chunks.size() < num_allowed; ++i) {
    const ChunkPool::Slot* slot = pool_.find(request.keys[i]);
    if (slot == nullptr || !can_lease(request, *slot)) continue;
    const bool is_growing = slot->state == ChunkPool::State::kWriting;
    promise::verified_only_in_slots(slot->ranks_in_frames, slot->ref.slot, request.is_sure_of_frames);
    chunks.push_back(slot->ref);
    reply.chunks.push_back({i, slot->ref, slot->meta.num_tokens, {}, slot->meta.window_from});
    if (!is_growing) reply.chunks.back().checksums = slot->checksums;
    reply.chunks.back().is_growing = is_growing;
    reply.chunks.back().tenant = slot->meta.tenant;
    reply.chunks.back().windows_from = slot->meta.windows_from;
    reply.chunks.back().givers = slot->givers;
    reply.chunks.back().lacks_slots = is_growing || slot->ranks_in_frames > 0;
    if (is_growing)
      promise::verified_only_while_saved(request.is_sure_of_frames, request.push, reply.chunks.back().checksums.size(),
                                         slot->ref.slot);
    promise::purged_is_gone(provenance_.is_purged(slot->givers), slot->ref.slot);
  }
  if (chunks.empty()) {
    if (num_allowed == 0) {
      counters_.leases_refused += 1;
      reply.refused =
          fmt::format("the holder has leased {} chunks to other nodes, the most that it allows", num_leased_chunks_);
    }
    return reply;
  }
  pool_.touch(chunks);
  reply.lease = numbers_.draw();
  num_leased_chunks_ += chunks.size();
  const std::size_t num_chunks = chunks.size();
  const PinId pin = pool_.pin(std::move(chunks), "lease of " + from, now, now + config_.lease_ttl);
  // A name that is not this node's is not kept, since any peer can make one up, of any length.
  const bool is_known = find_handoff(request.handoff) != handoffs_.end();
  if (!is_known && !request.handoff.empty()) counters_.unknown_handoffs += 1;
  GrantedLease& lease = leases_[reply.lease] = {pin, is_known ? request.handoff : "", num_chunks};
  if (sender_.knows(request.push)) {
    lease.push = request.push;
    for (const LeasedChunk& chunk : reply.chunks) lease.announced.push_back(request.keys[chunk.index]);
  }
  counters_.leases_granted += 1;
  return reply;
}

/// Returns true if the chunk is still being saved, and its layers are announced to the node that asks for it.
bool SchedulerCore::is_growing(const LeaseRequest& request, const ChunkPool::Slot& slot) const {
  return slot.state == ChunkPool::State::kWriting && request.is_sure_of_frames && !provenance_.is_purged(slot.givers) &&
         sender_.is_growing(request.push, slot.meta.key, slot.ref);
}

void SchedulerCore::lease_released(std::uint64_t lease) {
  const auto found = leases_.find(lease);
  // An unknown lease has expired, was released before, is of an earlier incarnation, or was never granted.
  if (found == leases_.end()) {
    counters_.unknown_releases += 1;
    return;
  }
  unpin_handoff(find_handoff(found->second.handoff));  // the decode node's pull of the prompt has ended
  pool_.unpin(found->second.pin);
  num_leased_chunks_ -= found->second.num_chunks;
  for (const ChunkKey& chunk : found->second.announced) sender_.lease_ended(found->second.push, chunk);
  leases_.erase(found);
}

void SchedulerCore::erase_ended_leases() {
  std::erase_if(leases_, [&](const auto& entry) {
    const bool has_ended = !pool_.pinned(entry.second.pin);
    if (has_ended) num_leased_chunks_ -= entry.second.num_chunks;
    return has_ended;
  });
}

// ---- pushes ----
void SchedulerCore::push_answered(std::uint64_t push, const std::string& endpoint, const PushReply& reply, TimeNs now) {
  now_ = now;
  if (!reply.refused.empty() && sender_.awaits_answer(push, endpoint))
    actions_.push_back(LogLine{
        fmt::format("node {} takes no KV of a prompt that was to be pushed to it, and must fetch or compute it: {}",
                    endpoint, reply.refused),
        true});
  sender_.answered(push, endpoint, reply, now);
}

PushReply SchedulerCore::push_offered(const std::string& from, const PushOffer& offer, TimeNs now,
                                      const std::string& member, std::uint64_t push) {
  now_ = now;
  PushReply reply = receiver_.offered(from, offer, member, push, now);
  if (reply.reservation != 0) {
    for (auto& [id, request] : requests_)
      if (request.source_left) receiver_.shorten_deadline(handed_off(request), now);
  }
  announce_evictions();
  return reply;
}

void SchedulerCore::push_revoked(const Revocation& answer, TimeNs now) {
  now_ = now;
  for (const ChunkRef chunk : receiver_.revoked(answer)) publish(chunk);
  has_ended_writes_ = true;
}

}  // namespace kvferry
