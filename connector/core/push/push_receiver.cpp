#include "connector/core/push/push_receiver.h"

#include <algorithm>

#include "connector/core/promises.h"
#include "transport/base/fingerprint.h"

namespace kvferry {

PushReply PushReceiver::offered(const std::string& from, const PushOffer& offer, const std::string& member,
                                std::uint64_t push, TimeNs now) {
  PushReply reply;
  reply.verdicts.assign(offer.chunks.size(), static_cast<std::uint8_t>(PushVerdict::kDeclined));
  if (offer.fingerprint != parts_.config.fingerprint) {
    reply.refused = "the two nodes serve different models (\"here\" is the node that refuses): " +
                    fingerprint_difference(parts_.config.fingerprint, offer.fingerprint);
    return reply;
  }
  Reservation reservation;
  reservation.givers = givers_of(offer.from, member);
  if (parts_.provenance.is_purged(reservation.givers)) {
    const std::string of_member = member.empty() ? "" : fmt::format(" of member '{}'", member);
    reply.refused =
        reservation.givers.front() == kUnknownGiver
            ? "KV of a node that does not name itself is not accepted: it may be one that an operator has purged"
            : fmt::format("KV of node {}{} is not accepted: an operator has purged it", offer.from, of_member);
    return reply;
  }
  // If the numbers of ranks differ, the shards differ too: nothing is granted, and this node will pull the chunks.
  if (offer.num_ranks != parts_.config.num_ranks) return reply;
  GrantOrder order;
  AnnouncedPushes::Push announced{offer.from, member, push, now + parts_.config.push_ttl};
  const bool is_announced =
      offer.has_frames && reservation.givers.front() != kUnknownGiver && announced_.has_room_for(offer.from);
  const std::size_t num_announced_before = announced_.num_chunks();
  const std::uint64_t id = parts_.numbers.draw();
  const std::string writer = "push of " + from;
  // Slots whose write was abandoned are limited too, since a peer can stop inside any number of copies.
  const std::size_t reserved_max = parts_.pool.num_slots() / 2, used_max = std::size_t{parts_.pool.num_slots()} * 3 / 4;
  for (std::uint32_t index = 0; index < offer.chunks.size(); ++index) {
    const OfferedChunk& offered = offer.chunks[index];
    ChunkMeta meta{offered.key, offered.num_tokens, offered.num_tokens < parts_.config.chunk_tokens, {},
                   0,           offer.tenant};
    if (!meta.has_possible_length(parts_.config.chunk_tokens)) {
      parts_.counters.mislabeled_chunks += 1;
      continue;
    }
    if (const ChunkPool::Slot* slot = parts_.pool.find(offered.key)) {
      reply.verdicts[index] = static_cast<std::uint8_t>(PushVerdict::kPresent);
      parts_.pool.touch({&slot->ref, 1});
      continue;
    }
    const std::size_t num_announced = num_announced_before + announced.expected.size();
    if (reservation_of_.size() + num_announced >= reserved_max || num_used_ >= used_max) continue;
    if (meta.is_tail && offered.tail_group != ChunkKey{}) meta.tail_group = offered.tail_group;
    if (is_announced) {
      reply.verdicts[index] = static_cast<std::uint8_t>(PushVerdict::kPulled);
      announced.expected.emplace(index, std::move(meta));
      continue;
    }
    const auto slot = parts_.pool.reserve(meta, writer, reservation.givers);
    if (!slot) continue;
    reply.verdicts[index] = static_cast<std::uint8_t>(PushVerdict::kGranted);
    reservation.chunks.emplace(index, Chunk{offered.key, *slot, offered.num_tokens, true, parts_.config.num_ranks});
    reservation_of_.emplace(offered.key, id);
    num_used_ += 1;
    order.chunks.push_back({index, *slot, offered.num_tokens});
  }
  if (!announced.expected.empty()) {
    promise::bounded_hold(now, announced.deadline, writer);
    announced_.expect(id, std::move(announced));
    reply.reservation = id;
    reply.takes_layers = true;
    return reply;
  }
  if (reservation.chunks.empty()) return reply;
  reply.reservation = order.reservation = id;
  reservation.deadline = now + parts_.config.push_ttl;
  order.lasts_ns = parts_.config.push_ttl;
  promise::bounded_hold(now, reservation.deadline, writer);
  reservations_.emplace(reply.reservation, std::move(reservation));
  parts_.actions.push_back(GrantSlots{std::move(order)});
  return reply;
}

void PushReceiver::revoke(std::uint64_t id, Reservation& reservation, std::span<const SettledChunk> chunks) {
  Revocation revocation;
  revocation.reservation = id;
  for (const SettledChunk& settled : chunks) {
    const auto found = reservation.chunks.find(settled.index);
    if (found == reservation.chunks.end() || !found->second.is_granted) continue;
    Chunk& chunk = found->second;
    ChunkMeta meta = parts_.pool.slot(chunk.slot.slot).meta;
    Givers givers = reservation.givers;
    if (settled.ok) add_givers(givers, settled.givers);
    const bool ok = settled.ok && settled.checksums.size() == parts_.config.num_ranks &&
                    !parts_.provenance.is_purged(givers) &&
                    meta.set_windows(settled.window_from, settled.windows_from, parts_.config.groups.size());
    chunk.is_granted = false;
    if (ok) parts_.pool.set_windows(chunk.slot, meta);
    if (ok) parts_.pool.add_givers(chunk.slot, givers);
    revocation.chunks.push_back({settled.index, chunk.slot, ok, ok ? settled.checksums : std::vector<std::uint64_t>{}});
  }
  if (!revocation.chunks.empty()) parts_.actions.push_back(RevokeSlots{std::move(revocation)});
}

void PushReceiver::grant_failed(std::uint64_t id, std::span<const std::uint32_t> indices) {
  const auto found = reservations_.find(id);
  if (found == reservations_.end()) return;
  std::vector<SettledChunk> failed;
  for (const std::uint32_t index : indices) failed.push_back({index, false, 0, {}, {}});
  revoke(id, found->second, failed);
}

void PushReceiver::settled(const PushSettlement& settlement) {
  const auto found = reservations_.find(settlement.reservation);
  if (found == reservations_.end()) {
    parts_.counters.unknown_releases += 1;
    return;
  }
  revoke(settlement.reservation, found->second, settlement.chunks);
}

std::vector<ChunkRef> PushReceiver::revoked(const Revocation& answer) {
  std::vector<ChunkRef> ready;
  const auto found = reservations_.find(answer.reservation);
  promise::exactly_once(found != reservations_.end() && answer.rank < parts_.config.num_ranks,
                        "the report on the revocation of slot reservation {}", answer.reservation);
  Reservation& reservation = found->second;
  for (const RevokedChunk& back : answer.chunks) {
    const auto entry = reservation.chunks.find(back.index);
    promise::exactly_once(
        entry != reservation.chunks.end() && !entry->second.is_granted && entry->second.slot == back.chunk,
        "the report on the revocation of slot reservation {}, chunk {}", answer.reservation, back.index);
    Chunk& chunk = entry->second;
    const bool ok = back.ok && back.checksums.size() == parts_.config.num_ranks;
    if (parts_.pool.rank_written(back.chunk, answer.rank, ok, ok ? back.checksums[answer.rank] : 0)) {
      parts_.counters.received_chunks += 1;
      ready.push_back(back.chunk);
    }
    if (--chunk.ranks_left > 0) continue;
    erase_reservation_of(chunk.key, answer.reservation);
    reservation.chunks.erase(entry);
    num_used_ -= 1;
  }
  if (reservation.chunks.empty()) reservations_.erase(found);
  return ready;
}

void PushReceiver::shorten_deadline(std::span<const ChunkMeta> chunks, TimeNs now) {
  if (reservation_of_.empty()) return;
  for (const ChunkMeta& chunk : chunks) {
    const auto found = reservation_of_.find(chunk.key);
    if (found == reservation_of_.end()) continue;
    Reservation& reservation = reservations_.at(found->second);
    reservation.deadline = std::min(reservation.deadline, now + parts_.config.try_timeout);
  }
}

void PushReceiver::invalidate() {
  for (const auto& [id, reservation] : reservations_)
    for (const auto& [index, chunk] : reservation.chunks) parts_.pool.fail_write(chunk.slot);
}

void PushReceiver::tick(TimeNs now) {
  for (auto& [id, reservation] : reservations_) {
    if (reservation.deadline > now) continue;
    std::vector<SettledChunk> overdue;
    for (const auto& [index, chunk] : reservation.chunks)
      if (chunk.is_granted) overdue.push_back({index, false, 0, {}});
    revoke(id, reservation, overdue);
    // A rank can't revoke the grant of a slot while a peer writes into it, and a stopped peer may never finish. After
    // another try_timeout these writes are therefore abandoned, and their chunks no longer count as reserved.
    if (reservation.deadline + parts_.config.try_timeout > now) continue;
    for (const auto& [index, chunk] : reservation.chunks) {
      if (!erase_reservation_of(chunk.key, id)) continue;
      parts_.pool.abandon_write(chunk.slot);
      parts_.counters.writes_abandoned += 1;
    }
  }
}

/// Erases the key from reservation_of_ if the key's chunk belongs to the slot reservation `id`. Returns false
/// otherwise.
bool PushReceiver::erase_reservation_of(const ChunkKey& key, std::uint64_t id) {
  const auto found = reservation_of_.find(key);
  if (found == reservation_of_.end() || found->second != id) return false;
  reservation_of_.erase(found);
  return true;
}

}  // namespace kvferry
