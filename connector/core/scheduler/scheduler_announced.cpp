// Announced pushes (announced_pushes.h): leases and pulls the chunks that a prefill node announces.
#include <utility>

#include "connector/core/promises.h"
#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry {

void SchedulerCore::push_settled(const PushSettlement& settlement, TimeNs now) {
  now_ = now;
  AnnouncedPushes::Push* const push = announced_.find(settlement.reservation);
  if (push == nullptr) return receiver_.settled(settlement);
  for (const SettledChunk& chunk : settlement.chunks) settle_announced(*push, chunk);
  advance_announced(now);
}

/// Takes the announcement of one chunk, which is ignored if the chunk is not expected any more.
void SchedulerCore::settle_announced(AnnouncedPushes::Push& push, const SettledChunk& chunk) {
  using State = AnnouncedPushes::Growing::State;
  const auto growing = push.growing.find(chunk.index);
  bool is_pulled = false;
  if (growing != push.growing.end()) {
    if (growing->second.state == State::kAsked) {
      growing->second.settled = chunk;
      return;
    }
    is_pulled = growing->second.state == State::kPulled && settle_growing(growing->second, chunk);
    push.growing.erase(growing);
  }
  auto expected = push.expected.extract(chunk.index);
  if (expected && chunk.ok && !is_pulled) push.complete.push_back(std::move(expected.mapped()));
}

/// Tells the workers that pull a growing chunk its checksums, or that it will not be completed. Returns false if the
/// pull has ended.
bool SchedulerCore::settle_growing(const AnnouncedPushes::Growing& growing, const SettledChunk& chunk) {
  const auto pull = pulls_.find(growing.pull);
  if (pull == pulls_.end()) return false;
  PullItem& item = pull->second.items.at(growing.item);
  if (chunk.ok && chunk.checksums.size() == config_.num_ranks) item.checksums = chunk.checksums;
  actions_.push_back(GrowPull{growing.pull, {growing.item}, 0, 0, true, item.checksums});
  return true;
}

/// Takes an announcement of layers. It is ignored unless the prefill node's frames were reached before, since it leases
/// growing chunks to no other node.
void SchedulerCore::push_progressed(const PushProgress& progress, TimeNs now) {
  now_ = now;
  AnnouncedPushes::Push* const push = announced_.find(progress.reservation);
  if (push == nullptr || progress.of == 0 || progress.done > progress.of) return;
  if (!frame_holders_.contains(push->endpoint)) return;
  std::map<std::uint64_t, GrowPull> told;  // [pull]
  for (const std::uint32_t index : progress.indices) {
    if (!push->expected.contains(index)) continue;
    AnnouncedPushes::Growing& growing = push->growing[index];
    growing.done = progress.done;
    growing.of = progress.of;
    if (growing.state != AnnouncedPushes::Growing::State::kPulled || !pulls_.contains(growing.pull)) continue;
    told.try_emplace(growing.pull, GrowPull{growing.pull, {}, progress.done, progress.of, false, {}});
    told.at(growing.pull).items.push_back(growing.item);
  }
  for (auto& [pull, items] : told) actions_.push_back(std::move(items));
  advance_announced(now);
}

/// Sends a lease request for the announced and growing chunks of each push that has no such request in progress. The
/// request names chunks that are in the pool by now too, so that the prefill node learns that this node needs nothing
/// more of them.
void SchedulerCore::advance_announced(TimeNs now) {
  for (auto& [id, push] : announced_.pushes()) {
    using State = AnnouncedPushes::Growing::State;
    if (!push.asked.empty()) continue;
    std::vector<std::uint32_t> told;
    for (const auto& [index, growing] : push.growing)
      if (growing.state == State::kTold) told.push_back(index);
    if (push.complete.empty() && told.empty()) continue;
    if (!suspects_.allows(push.endpoint, now) || provenance_.is_purged(givers_of(push.endpoint, push.member))) {
      push.complete.clear();
      for (const std::uint32_t index : told) push.growing.at(index).state = State::kRefused;
      continue;
    }
    RequestLease lease{++last_id_, push.endpoint, {config_.fingerprint, {}, {}}};
    lease.request.push = push.push;
    lease.request.is_sure_of_frames = frame_holders_.contains(push.endpoint);
    push.asked = std::exchange(push.complete, {});
    for (const std::uint32_t index : told) {
      push.growing.at(index).state = State::kAsked;
      push.asked.push_back(push.expected.at(index));
    }
    push.asked_growing = std::move(told);
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
  const std::vector<std::uint32_t> growing = std::exchange(push.asked_growing, {});
  const StartPull* pull = start_pull({}, push.endpoint, push.member, asked, reply, now, true);
  const std::uint64_t id = pull == nullptr ? 0 : pull->pull;
  if (reply.chunks.empty()) suspects_.had_nothing(push.endpoint);
  if (pull == nullptr && reply.lease != 0) actions_.push_back(ReleaseLease{push.endpoint, reply.lease});
  growing_answered(push, growing, id);
  advance_announced(now);
}

/// Takes the end of a lease request for growing chunks, after which the pull `pull` has begun; 0: none has.
void SchedulerCore::growing_answered(AnnouncedPushes::Push& push, std::span<const std::uint32_t> indices,
                                     std::uint64_t pull) {
  using State = AnnouncedPushes::Growing::State;
  std::unordered_map<ChunkKey, std::uint32_t> items;  // [chunk] its place in the pull
  if (pull != 0)
    for (const PullItem& item : pulls_.at(pull).items)
      items.emplace(pool_.slot(item.local.slot).meta.key, static_cast<std::uint32_t>(items.size()));
  for (const std::uint32_t index : indices) {
    AnnouncedPushes::Growing& growing = push.growing.at(index);
    const auto item = items.find(push.expected.at(index).key);
    if (item != items.end() && !pulls_.at(pull).items[item->second].is_growing) {  // it was leased when it was complete
      push.growing.erase(index);
      push.expected.erase(index);
      continue;
    }
    growing.state = item == items.end() ? State::kRefused : State::kPulled;
    if (growing.state == State::kPulled) {
      growing.pull = pull;
      growing.item = item->second;
      actions_.push_back(GrowPull{pull, {growing.item}, growing.done, growing.of, false, {}});
    }
    if (const std::optional<SettledChunk> settled = std::exchange(growing.settled, {}))
      settle_announced(push, *settled);
  }
}

void SchedulerCore::tick_announced(TimeNs now) {
  for (auto& [id, push] : announced_.pushes()) {
    if (push.asked.empty() || push.try_deadline > now) continue;
    counters_.fetch_timeouts += 1;
    suspect(push.endpoint, now);
    push.asked.clear();
    growing_answered(push, std::exchange(push.asked_growing, {}), 0);
  }
  advance_announced(now);
}

}  // namespace kvferry
