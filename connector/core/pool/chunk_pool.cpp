#include "connector/core/pool/chunk_pool.h"

#include <algorithm>
#include <utility>

#include "connector/core/promises.h"

namespace kvferry {

ChunkPool::ChunkPool(std::uint32_t num_slots, std::uint32_t num_ranks)
    : num_ranks_(num_ranks), slots_(num_slots), tenants_(num_slots) {
  KVFERRY_CHECK(num_slots > 0 && num_ranks > 0,
                "a pool needs at least one slot and one rank, not {} slots and {} ranks", num_slots, num_ranks);
  for (std::uint32_t i = num_slots; i-- > 0;) {
    slots_[i].ref.slot = i;
    free_.push_back(i);
  }
}

const ChunkPool::Slot* ChunkPool::find(const ChunkKey& key) const {
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? nullptr : &slots_[found->second];
}

std::vector<const ChunkPool::Slot*> ChunkPool::tails(const ChunkKey& group) const {
  std::vector<const Slot*> found;
  if (const auto it = by_group_.find(group); it != by_group_.end()) {
    for (auto index = it->second.rbegin(); index != it->second.rend(); ++index) found.push_back(&slots_[*index]);
  }
  return found;
}

ChunkPool::Slot& ChunkPool::checked(ChunkRef chunk) {
  KVFERRY_CHECK(chunk.slot < slots_.size(), "pool slot {} does not exist: the pool has {} slots", chunk.slot,
                slots_.size());
  Slot& slot = slots_[chunk.slot];
  KVFERRY_CHECK(slot.ref == chunk,
                "pool slot {} is in generation {} (number of chunks it has had), but generation {} was expected",
                chunk.slot, slot.ref.generation, chunk.generation);
  return slot;
}

std::optional<ChunkRef> ChunkPool::reserve(const ChunkMeta& meta, const std::string& writer, Givers givers) {
  KVFERRY_CHECK(!by_key_.contains(meta.key) && !writer.empty(),
                "chunk {} can't be written by '{}': the pool has it already, or the writer has no name", meta.key,
                writer);
  if (free_.empty()) {
    const std::uint32_t share = tenants_.share(meta.tenant);
    const auto victim = tenants_.victim(meta.tenant, share, [&](std::uint32_t i) { return !is_used(slots_[i]); });
    if (!victim) return std::nullopt;
    const bool is_own = victim->tenant.id == meta.tenant;
    promise::fair_eviction(is_own || victim->tenant.is_idle, victim->tenant.num_slots, share);
    evicted_for_tenants_ += is_own ? 0 : 1;
    evict(slots_[victim->slot]);
  }
  Slot& slot = slots_[free_.back()];
  const bool is_idle = slot.state == State::kFree && slot.writer.empty() && slot.ranks_in_frames == 0;
  promise::fenced_reuse(slot.pins, is_idle, slot.ref.slot);
  free_.pop_back();
  slot.state = State::kWriting;
  slot.ref.generation += 1;
  slot.meta = meta;
  slot.checksums.assign(num_ranks_, 0);
  slot.written.assign(num_ranks_, false);
  slot.ranks_done = 0;
  slot.in_frame.assign(num_ranks_, false);
  slot.write_failed = false;
  slot.is_named = false;
  slot.writer = writer;
  slot.givers = std::move(givers);
  slot.tenant = &tenants_.take(meta.tenant);
  by_key_[meta.key] = slot.ref.slot;
  writing_ += 1;
  return slot.ref;
}

bool ChunkPool::rank_written(ChunkRef chunk, std::uint32_t rank, bool ok, std::uint64_t checksum, bool in_frame) {
  Slot& slot = checked(chunk);
  promise::exactly_once(slot.state == State::kWriting && rank < num_ranks_ && !slot.written[rank],
                        "the report on the write of pool slot {} by rank {}", chunk.slot, rank);
  slot.written[rank] = true;
  slot.checksums[rank] = checksum;
  slot.write_failed |= !ok;
  slot.in_frame[rank] = in_frame;
  slot.ranks_in_frames += in_frame ? 1 : 0;
  if (++slot.ranks_done < num_ranks_) return false;
  slot.writer.clear();
  writing_ -= 1;
  note_change(slot.meta.key);
  if (slot.write_failed) {
    erase_key(slot);
    free_or_retire(slot);
    return false;
  }
  slot.state = State::kReady;
  slot.lru = slot.tenant->ready.insert(slot.tenant->ready.end(), slot.ref.slot);
  ready_ += 1;
  if (slot.meta.is_tail && slot.meta.tail_group) {
    // Limit on the tails in one list of by_group_; older tails are found only by their keys.
    constexpr std::size_t kTailsPerGroup = 16;
    std::vector<std::uint32_t>& group = by_group_[*slot.meta.tail_group];
    group.push_back(slot.ref.slot);
    if (group.size() > kTailsPerGroup) group.erase(group.begin());
  }
  return true;
}

bool ChunkPool::slot_written(ChunkRef chunk, std::uint32_t rank, bool ok) {
  Slot& slot = checked(chunk);
  promise::exactly_once(rank < num_ranks_ && slot.in_frame[rank], "the report on the copy to pool slot {} by rank {}",
                        chunk.slot, rank);
  if (!ok && slot.state == State::kReady) evict(slot);
  slot.write_failed |= !ok;
  slot.in_frame[rank] = false;
  slot.ranks_in_frames -= 1;
  if (slot.state == State::kRetired && !is_used(slot)) free_or_retire(slot);
  return slot.is_complete();
}

void ChunkPool::add_givers(ChunkRef chunk, const Givers& givers) {
  Slot& slot = checked(chunk);
  KVFERRY_CHECK(slot.state == State::kWriting,
                "pool slot {} is not being written, so its chunk can't come from further nodes", chunk.slot);
  kvferry::add_givers(slot.givers, givers);
}

void ChunkPool::set_windows(ChunkRef chunk, const ChunkMeta& meta) {
  Slot& slot = checked(chunk);
  KVFERRY_CHECK(slot.state == State::kWriting && meta.window_from <= slot.meta.num_tokens,
                "pool slot {} is not being written, or its chunk of {} tokens has no token {}, where its window begins",
                chunk.slot, slot.meta.num_tokens, meta.window_from);
  slot.meta.window_from = meta.window_from;
  slot.meta.windows_from = meta.windows_from;
}

void ChunkPool::fail_write(ChunkRef chunk) {
  Slot& slot = checked(chunk);
  KVFERRY_CHECK(slot.state == State::kWriting, "pool slot {} is not being written, so its write cannot fail",
                chunk.slot);
  slot.write_failed = true;
}

void ChunkPool::abandon_write(ChunkRef chunk) {
  fail_write(chunk);
  erase_key(slots_[chunk.slot]);
}

/// Erases the slot's key, unless another slot was reserved for the key after abandon_write().
void ChunkPool::erase_key(const Slot& slot) {
  const auto found = by_key_.find(slot.meta.key);
  if (found != by_key_.end() && found->second == slot.ref.slot) by_key_.erase(found);
}

void ChunkPool::invalidate(ChunkRef chunk) {
  // There is nothing to drop if no such slot exists, or if the slot was reused for another chunk.
  if (chunk.slot >= slots_.size() || slots_[chunk.slot].ref != chunk) return;
  if (slots_[chunk.slot].state == State::kReady) evict(slots_[chunk.slot]);
}

/// Removes a ready slot from every index. Reports its key as evicted if the chunk was complete in its slot.
void ChunkPool::evict(Slot& slot) {
  by_key_.erase(slot.meta.key);
  if (slot.meta.tail_group) {
    if (const auto group = by_group_.find(*slot.meta.tail_group); group != by_group_.end()) {
      std::erase(group->second, slot.ref.slot);
      if (group->second.empty()) by_group_.erase(group);
    }
  }
  slot.tenant->ready.erase(slot.lru);
  ready_ -= 1;
  // A chunk that some rank has only in a frame was not published to the controller.
  if (slot.ranks_in_frames == 0) evicted_.push_back(slot.meta.key);
  note_change(slot.meta.key);
  free_or_retire(slot);
}

void ChunkPool::free_or_retire(Slot& slot) {
  slot.state = is_used(slot) ? State::kRetired : State::kFree;
  if (slot.state != State::kFree) return;
  tenants_.give_back(*std::exchange(slot.tenant, nullptr));
  free_.push_back(slot.ref.slot);
}

void ChunkPool::note_change(const ChunkKey& key) {
  if (!changed_ || has_dropped_changes_) return;
  // The list is limited: an idle engine does not take the changes, while other nodes may go on filling its pool.
  has_dropped_changes_ = changed_->size() >= 2 * slots_.size();
  if (has_dropped_changes_)
    changed_->clear();
  else
    changed_->push_back(key);
}

PoolChanges ChunkPool::take_changes() {
  PoolChanges changes{std::exchange(has_dropped_changes_, false), {}};
  if (!changed_) return changes;
  const auto add = [&](const ChunkKey& key, const Slot* slot) {
    const State state = slot == nullptr ? State::kFree : slot->state;
    changes.chunks.push_back({key, state == State::kReady, state == State::kWriting});
  };
  if (changes.is_all)
    for (const auto& [key, index] : by_key_) add(key, &slots_[index]);
  for (const ChunkKey& key : *changed_) add(key, find(key));
  changed_->clear();
  return changes;
}

bool ChunkPool::name(ChunkRef chunk) { return changed_ && !std::exchange(checked(chunk).is_named, true); }

void ChunkPool::touch(std::span<const ChunkRef> chunks) {
  for (auto chunk = chunks.rbegin(); chunk != chunks.rend(); ++chunk) {
    Slot& slot = checked(*chunk);
    if (slot.state != State::kReady) continue;
    TenantSlots::Lru& ready = slot.tenant->ready;
    ready.splice(ready.end(), ready, slot.lru);
    tenants_.used(*slot.tenant);
  }
}

void ChunkPool::demote(ChunkRef chunk) {
  if (chunk.slot >= slots_.size()) return;
  Slot& slot = slots_[chunk.slot];
  if (slot.ref != chunk || slot.state != State::kReady) return;
  TenantSlots::Lru& ready = slot.tenant->ready;
  ready.splice(ready.begin(), ready, slot.lru);
}

PinId ChunkPool::pin(std::vector<ChunkRef> chunks, std::string owner, TimeNs now, TimeNs deadline) {
  promise::bounded_hold(now, deadline, owner);
  for (ChunkRef chunk : chunks) {
    Slot& slot = checked(chunk);
    KVFERRY_CHECK(slot.state == State::kWriting || slot.state == State::kReady,
                  "pool slot {} can't be pinned: it has no chunk, or its chunk was evicted", chunk.slot);
    pinned_ += slot.pins++ == 0 ? 1 : 0;
  }
  pins_.emplace(++last_pin_, Pin{std::move(chunks), std::move(owner), deadline});
  return PinId{last_pin_};
}

bool ChunkPool::unpin(PinId id) {
  const auto found = pins_.find(id.value);
  if (found == pins_.end()) return false;
  for (ChunkRef chunk : found->second.chunks) {
    Slot& slot = checked(chunk);  // a pinned slot is never reused, so the generation matches
    KVFERRY_CHECK(slot.pins > 0, "pool slot {} was unpinned more often than it was pinned", chunk.slot);
    pinned_ -= --slot.pins == 0 ? 1 : 0;
    if (slot.state == State::kRetired && !is_used(slot)) free_or_retire(slot);
  }
  pins_.erase(found);
  return true;
}

std::vector<std::string> ChunkPool::expire_pins(TimeNs now) {
  std::vector<std::string> owners;
  for (auto it = pins_.begin(); it != pins_.end();) {
    const std::uint64_t id = it->first;
    const bool expired = it->second.deadline <= now;
    if (expired) owners.push_back(it->second.owner);
    ++it;
    if (expired) unpin(PinId{id});
  }
  return owners;
}

std::vector<const ChunkPool::Slot*> ChunkPool::ready() const {
  std::vector<const Slot*> found;
  tenants_.for_each([&](const TenantSlots::Tenant& tenant) {
    for (const std::uint32_t index : tenant.ready) found.push_back(&slots_[index]);
  });
  return found;
}

}  // namespace kvferry
