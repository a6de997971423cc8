#include "connector/core/push/push_sender.h"

#include <algorithm>

#include "connector/core/promises.h"

namespace kvferry {

void PushSender::offer(const RequestId& request, const std::string& endpoint, std::span<const ChunkMeta> chunks,
                       TimeNs now, std::uint64_t record) {
  if (chunks.empty()) return;
  const std::uint64_t id = next_push_++;
  Push push;
  push.request = request;
  push.endpoint = endpoint;
  push.record = record;
  push.began = now;
  push.event.peer = endpoint;
  push.deadline = now + parts_.config.push_ttl;
  promise::bounded_hold(now, push.deadline, "push of " + request.value);
  PushOffer offer{parts_.config.fingerprint, parts_.config.num_ranks, {}, {}, chunks[0].tenant, parts_.config.endpoint};
  for (const ChunkMeta& meta : chunks) {
    waiting_[meta.key].insert({id, static_cast<std::uint32_t>(push.items.size())});
    push.items.push_back({});
    push.items.back().meta = meta;
    offer.chunks.push_back({meta.key, meta.num_tokens, meta.tail_group.value_or(ChunkKey{})});
  }
  parts_.recorder.add(record, LifeKind::kPushOffered, now, push.event).chunks =
      static_cast<std::uint32_t>(push.items.size());
  pushes_.emplace(id, std::move(push));
  parts_.actions.push_back(OfferPush{id, endpoint, std::move(offer)});
}

bool PushSender::awaits_answer(std::uint64_t id, const std::string& endpoint) const {
  const auto found = pushes_.find(id);
  return found != pushes_.end() && !found->second.is_answered && found->second.endpoint == endpoint;
}

void PushSender::answered(std::uint64_t id, const std::string& endpoint, const PushReply& reply, TimeNs now) {
  if (!awaits_answer(id, endpoint)) {
    parts_.counters.unasked_answers += 1;
    return;
  }
  Push& push = pushes_.at(id);
  push.is_answered = true;
  push.reservation = reply.reservation;
  push.takes_layers = reply.takes_layers;
  if (!reply.refused.empty()) note(push, Cause::kRefused, reply.refused);
  for (std::uint32_t index = 0; index < push.items.size(); ++index) {
    Item& item = push.items[index];
    const PushVerdict verdict{index < reply.verdicts.size() ? reply.verdicts[index] : std::uint8_t{0}};
    item.is_pulled = reply.reservation != 0 && verdict == PushVerdict::kPulled;
    const bool is_wanted = item.is_pulled || (reply.reservation != 0 && verdict == PushVerdict::kGranted);
    item.is_granted = is_wanted;
    const bool is_declined = !is_wanted && verdict != PushVerdict::kPresent;
    if (is_declined)
      note(push, Cause::kRefused,
           "the decode node has no slot left for pushes, or its ranks hold other layers or heads");
    push.event.failed += is_declined;
    push.is_incomplete |= is_declined;
    if (item.state == State::kFinished) {  // the chunk's push ended before the answer arrived
      if (is_wanted) settle(push, index, false);
    } else if (item.state == State::kTransferring) {
      if (!is_wanted) item.failed = true;  // the workers have no grant and will report the failure
      advance(id, push, index);
    } else if (!is_wanted) {
      finish(id, push, index);
    } else {
      item.state = State::kAccepted;
      const ChunkPool::Slot* slot = parts_.pool.find(item.meta.key);
      // If the chunk can't be read yet, saving() or chunk_ready() starts its transfer later.
      if (slot != nullptr && slot->is_readable(item.is_pulled)) start_transfer(id, push, index, *slot, now);
    }
  }
  erase_if_finished(id);
}

std::optional<PushSender::Tag> PushSender::saving(const ChunkKey& key, ChunkRef chunk, TimeNs now) {
  const auto found = waiting_.find(key);
  if (found == waiting_.end()) return std::nullopt;
  for (const Tag place : found->second) {
    Push& push = pushes_.at(place.push);
    Item& item = push.items[place.index];
    if (push.is_dropped || (item.state != State::kOffered && item.state != State::kAccepted)) continue;
    // Without layers to announce, the workers have nothing to do; chunk_ready() announces the chunk.
    if (item.is_pulled && !(parts_.config.pushes_layers && push.takes_layers)) continue;
    item.state = State::kTransferring;
    item.chunk = chunk;
    item.pin = parts_.pool.pin({chunk}, "push of " + push.request.value, now, push.deadline + parts_.config.push_grace);
    return place;
  }
  return std::nullopt;
}

/// Makes the workers push a chunk that is complete in its slot, or announces a ready chunk to a decode node that pulls
/// it, from frames if it is not in its slot yet.
void PushSender::start_transfer(std::uint64_t id, Push& push, std::uint32_t index, const ChunkPool::Slot& slot,
                                TimeNs now) {
  Item& item = push.items[index];
  promise::verified_only_in_slots(slot.ranks_in_frames, slot.ref.slot, item.is_pulled);
  // If the lengths differ, another node has sent a wrong chunk with this key, which is not pushed.
  if (slot.meta.num_tokens != item.meta.num_tokens) return;
  item.chunk = slot.ref;
  item.is_ready = true;
  push.ready_at = now;
  item.meta = slot.meta;
  if (item.is_pulled) {
    item.state = State::kAnnounced;
    return settle(push, index, true);
  }
  item.state = State::kTransferring;
  item.pin =
      parts_.pool.pin({slot.ref}, "push of " + push.request.value, now, push.deadline + parts_.config.push_grace);
  parts_.actions.push_back(StartPush{id, index, slot.ref, slot.meta.num_tokens, slot.checksums});
}

void PushSender::chunk_ready(const ChunkPool::Slot& slot, TimeNs now) {
  const auto found = waiting_.find(slot.meta.key);
  if (found == waiting_.end()) return;
  const std::vector<Tag> places(found->second.begin(), found->second.end());
  for (const Tag place : places) {
    const auto entry = pushes_.find(place.push);
    if (entry == pushes_.end() || entry->second.is_dropped) continue;
    Push& push = entry->second;
    Item& item = push.items[place.index];
    if (item.state == State::kTransferring && item.chunk == slot.ref) {
      item.is_ready = true;
      push.ready_at = now;
      item.meta = slot.meta;
      advance(place.push, push, place.index);
    } else if (item.state == State::kAccepted && slot.is_readable(item.is_pulled)) {
      start_transfer(place.push, push, place.index, slot, now);
    }
    erase_if_finished(place.push);
  }
}

void PushSender::chunk_write_failed(ChunkRef chunk) {
  for (auto it = pushes_.begin(); it != pushes_.end();) {
    const std::uint64_t id = it->first;
    Push& push = it->second;
    ++it;
    for (std::uint32_t index = 0; index < push.items.size(); ++index) {
      Item& item = push.items[index];
      if (item.state != State::kTransferring || item.chunk != chunk || item.is_ready) continue;
      item.failed = true;
      advance(id, push, index);
    }
    erase_if_finished(id);
  }
}

void PushSender::chunk_push_ended(const PushOutcome& outcome) {
  const auto found = pushes_.find(outcome.push);
  if (found == pushes_.end()) return;  // the push is unknown, because it was erased after its grace period
  Push& push = found->second;
  const bool is_known = outcome.index < push.items.size() && outcome.rank < parts_.config.num_ranks &&
                        push.items[outcome.index].state == State::kTransferring &&
                        push.items[outcome.index].ranks_done.insert(outcome.rank).second;
  promise::exactly_once(is_known, "the end of push {} of chunk {} by rank {}", outcome.push, outcome.index,
                        outcome.rank);
  // The workers have no grant for a chunk that the decode node pulls, so their failure says nothing about it.
  const bool has_failed = !outcome.ok && !push.items[outcome.index].is_pulled;
  push.items[outcome.index].failed |= has_failed;
  if (has_failed) note(push, cause_of(static_cast<ErrorCode>(outcome.code)), outcome.what);
  if (!outcome.path.empty()) push.event.path = outcome.path;
  push.event.limit_mb_per_s = std::max(push.event.limit_mb_per_s, outcome.limit_mb_per_s * parts_.config.num_ranks);
  advance(outcome.push, push, outcome.index);
  erase_if_finished(outcome.push);
}

/// Ends the push of this item once its outcome is final, and settles the item if the decode node has answered.
void PushSender::advance(std::uint64_t id, Push& push, std::uint32_t index) {
  Item& item = push.items[index];
  if (item.ranks_done.size() < parts_.config.num_ranks) return;  // ranks that have not reported may still read the slot
  if (!item.failed && !item.is_ready) return;                    // the chunk's save has not ended yet
  // The chunk may have been invalidated since it became ready.
  const ChunkPool::Slot& slot = parts_.pool.slot(item.chunk.slot);
  const bool is_good = !item.failed && !push.is_dropped && slot.state == ChunkPool::State::kReady;
  if (push.is_answered) settle(push, index, is_good);
  finish(id, push, index);
  // From here to the decode node's lease the chunk is not pinned. It is among the most recently used ones, and if it is
  // evicted all the same, the decode node gets no lease and fetches the chunk elsewhere.
  if (is_good && item.is_pulled) item.state = State::kAnnounced;
}

void PushSender::lease_ended(std::uint64_t id, const ChunkKey& chunk) {
  const auto found = pushes_.find(id);
  for (std::uint32_t index = 0; found != pushes_.end() && index < found->second.items.size(); ++index) {
    const Item& item = found->second.items[index];
    if (item.state == State::kAnnounced && item.meta.key == chunk) finish(id, found->second, index);
  }
  erase_if_finished(id);
}

void PushSender::settle(Push& push, std::uint32_t index, bool ok) {
  Item& item = push.items[index];
  if (!item.is_granted) return;
  item.is_granted = false;
  push.is_incomplete |= !ok;
  CoreCounters& counters = parts_.counters;
  (!ok ? counters.push_failures : item.is_pulled ? counters.announced_chunks : counters.pushed_chunks) += 1;
  (ok ? push.event.chunks : push.event.failed) += 1;
  if (ok && item.is_pulled) {  // the decode node, which pulls the chunk, records its bytes
    if (push.event.why() == Cause::kNone) push.event.note = "announced";
  } else if (ok) {
    push.event.tokens += item.meta.num_tokens;
    push.event.bytes += parts_.config.bytes_of(item.meta.num_tokens);
  }
  SettledChunk settled{index, ok, item.meta.window_from, {}, item.meta.windows_from};
  if (ok) {
    const ChunkPool::Slot& slot = parts_.pool.slot(item.chunk.slot);
    promise::verified_only(slot.ref == item.chunk && slot.checksums.size() == parts_.config.num_ranks,
                           slot.checksums.size(), parts_.config.num_ranks, item.chunk.slot);
    settled.checksums = slot.checksums;
    settled.givers = slot.givers;
  }
  parts_.actions.push_back(SettlePush{push.endpoint, {push.reservation, {std::move(settled)}}});
}

void PushSender::finish(std::uint64_t id, Push& push, std::uint32_t index) {
  Item& item = push.items[index];
  if (item.state == State::kTransferring) parts_.pool.unpin(item.pin);
  item.state = State::kFinished;
  if (const auto found = waiting_.find(item.meta.key); found != waiting_.end()) {
    found->second.erase({id, index});
    if (found->second.empty()) waiting_.erase(found);
  }
}

/// Settles an item as incomplete and ends it: the workers were not ordered to push it, or have not reported in time.
void PushSender::fail(std::uint64_t id, Push& push, std::uint32_t index) {
  settle(push, index, false);
  finish(id, push, index);
}

void PushSender::request_finished(const RequestId& request) {
  for (auto it = pushes_.begin(); it != pushes_.end();) {
    const std::uint64_t id = it->first;
    Push& push = it->second;
    ++it;
    if (push.request != request) continue;
    for (std::uint32_t index = 0; index < push.items.size(); ++index) {
      const Item& item = push.items[index];
      const bool is_waiting = item.state == State::kOffered || item.state == State::kAccepted;
      if (is_waiting && parts_.pool.find(item.meta.key) == nullptr) fail(id, push, index);
    }
    erase_if_finished(id);
  }
}

void PushSender::drop(std::uint64_t id, Push& push, TimeNs now) {
  push.is_dropped = true;
  push.erase_at = now + parts_.config.push_grace;
  for (std::uint32_t index = 0; index < push.items.size(); ++index) {
    const State state = push.items[index].state;
    if (state == State::kOffered || state == State::kAccepted) fail(id, push, index);
    if (state == State::kAnnounced) finish(id, push, index);
    if (state == State::kTransferring) push.items[index].failed = true;
  }
  parts_.actions.push_back(DropPush{id});
}

void PushSender::erase_if_finished(std::uint64_t id) {
  const auto found = pushes_.find(id);
  if (found == pushes_.end() || !found->second.is_answered) return;
  for (const Item& item : found->second.items)
    if (item.state != State::kFinished) return;
  if (!found->second.is_dropped) {
    parts_.actions.push_back(DropPush{id});
    if (!found->second.is_incomplete) delivered_(found->second.request);
  }
  found->second.event.duration = parts_.now - found->second.began;
  found->second.event.wire = parts_.now - std::max(found->second.ready_at, found->second.began);
  parts_.recorder.add(found->second.record, LifeKind::kPushed, parts_.now, found->second.event);
  pushes_.erase(found);
}

void PushSender::tick(TimeNs now) {
  for (auto it = pushes_.begin(); it != pushes_.end();) {
    const std::uint64_t id = it->first;
    Push& push = it->second;
    ++it;
    if (!push.is_dropped && push.deadline <= now) {
      note(push, push.is_answered ? Cause::kTooSlow : Cause::kNoAnswer);
      push.is_answered = true;  // the push no longer waits for an answer that is overdue
      drop(id, push, now);
    } else if (push.is_dropped && push.erase_at <= now) {
      for (std::uint32_t index = 0; index < push.items.size(); ++index)
        if (push.items[index].state == State::kTransferring) fail(id, push, index);
    } else {
      continue;
    }
    erase_if_finished(id);
  }
}

}  // namespace kvferry
