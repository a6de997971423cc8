#include "connector/core/push/push_receiver.h"

#include <algorithm>

#include "connector/core/promises.h"
#include "transport/base/fingerprint.h"

namespace kvferry {

PushReply PushReceiver::offered(const std::string& from, const PushOffer& offer, TimeNs now) {
  PushReply reply;
  reply.verdicts.assign(offer.chunks.size(), static_cast<std::uint8_t>(PushVerdict::kLater));
  if (offer.fingerprint != config_.fingerprint) {
    reply.refused =
        "different models on the two sides: " + fingerprint_difference(config_.fingerprint, offer.fingerprint);
    return reply;
  }
  if (offer.num_ranks != config_.num_ranks) return reply;  // not shaped alike: pulled
  Loan loan;
  LendOrder order;
  const std::string writer = "push of " + from;
  for (std::uint32_t index = 0; index < offer.chunks.size(); ++index) {
    const OfferedChunk& offered = offer.chunks[index];
    if (offered.num_tokens == 0 || offered.num_tokens > config_.chunk_tokens) continue;
    if (const ChunkPool::Slot* slot = pool_.find(offered.key)) {
      reply.verdicts[index] = static_cast<std::uint8_t>(PushVerdict::kHave);
      pool_.touch({&slot->ref, 1});
      continue;
    }
    if (by_key_.size() >= pool_.num_slots() / 2) continue;
    ChunkMeta meta{offered.key, offered.num_tokens, offered.num_tokens < config_.chunk_tokens, {}};
    if (meta.is_tail && offered.tail_group != ChunkKey{}) meta.tail_group = offered.tail_group;
    const auto slot = pool_.reserve(meta, writer);
    if (!slot) continue;
    reply.verdicts[index] = static_cast<std::uint8_t>(PushVerdict::kGo);
    loan.chunks.emplace(index, Chunk{offered.key, *slot, offered.num_tokens, true, config_.num_ranks});
    by_key_.emplace(offered.key, next_ticket_);
    order.chunks.push_back({index, *slot, offered.num_tokens});
  }
  if (loan.chunks.empty()) return reply;
  reply.ticket = order.ticket = next_ticket_++;
  loan.deadline = now + config_.ttl;
  promise::bounded_hold(now, loan.deadline, writer);
  loans_.emplace(reply.ticket, std::move(loan));
  actions_.push_back(LendSlots{std::move(order)});
  return reply;
}

void PushReceiver::take_back(std::uint64_t ticket, Loan& loan, std::span<const SettledChunk> chunks) {
  Reclaim reclaim;
  reclaim.ticket = ticket;
  for (const SettledChunk& settled : chunks) {
    const auto found = loan.chunks.find(settled.index);
    if (found == loan.chunks.end() || !found->second.is_lent) continue;
    Chunk& chunk = found->second;
    const bool ok =
        settled.ok && settled.checksums.size() == config_.num_ranks && settled.window_from <= chunk.num_tokens;
    chunk.is_lent = false;
    if (ok) pool_.tell_window(chunk.slot, settled.window_from);
    reclaim.chunks.push_back({settled.index, chunk.slot, ok, ok ? settled.checksums : std::vector<std::uint64_t>{}});
  }
  if (!reclaim.chunks.empty()) actions_.push_back(ReclaimSlots{std::move(reclaim)});
}

void PushReceiver::not_lent(std::uint64_t ticket, std::span<const std::uint32_t> indices) {
  const auto found = loans_.find(ticket);
  if (found == loans_.end()) return;
  std::vector<SettledChunk> failed;
  for (const std::uint32_t index : indices) failed.push_back({index, false, 0, {}});
  take_back(ticket, found->second, failed);
}

void PushReceiver::settled(const PushSettlement& settlement) {
  const auto found = loans_.find(settlement.ticket);
  if (found != loans_.end()) take_back(settlement.ticket, found->second, settlement.chunks);
}

std::vector<ChunkRef> PushReceiver::reclaimed(const Reclaim& answer) {
  std::vector<ChunkRef> ready;
  const auto found = loans_.find(answer.ticket);
  promise::exactly_once(found != loans_.end() && answer.rank < config_.num_ranks,
                        fmt::format("the end of loan {}", answer.ticket));
  Loan& loan = found->second;
  for (const ReclaimedChunk& back : answer.chunks) {
    const auto entry = loan.chunks.find(back.index);
    promise::exactly_once(entry != loan.chunks.end() && !entry->second.is_lent && entry->second.slot == back.chunk,
                          fmt::format("the end of loan {}, chunk {}", answer.ticket, back.index));
    Chunk& chunk = entry->second;
    const bool ok = back.ok && back.checksums.size() == config_.num_ranks;
    if (pool_.rank_written(back.chunk, answer.rank, ok, ok ? back.checksums[answer.rank] : 0)) {
      num_received_ += 1;
      ready.push_back(back.chunk);
    }
    if (--chunk.ranks_left > 0) continue;
    by_key_.erase(chunk.key);
    loan.chunks.erase(entry);
  }
  if (loan.chunks.empty()) loans_.erase(found);
  return ready;
}

void PushReceiver::shorten_deadline(std::span<const ChunkKey> keys, TimeNs now) {
  if (by_key_.empty()) return;
  for (const ChunkKey& key : keys) {
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) continue;
    Loan& loan = loans_.at(found->second);
    loan.deadline = std::min(loan.deadline, now + config_.hurry_ttl);
  }
}

void PushReceiver::invalidate() {
  for (const auto& [ticket, loan] : loans_)
    for (const auto& [index, chunk] : loan.chunks) pool_.spoil(chunk.slot);
}

void PushReceiver::tick(TimeNs now) {
  for (auto& [ticket, loan] : loans_) {
    if (loan.deadline > now) continue;
    std::vector<SettledChunk> overdue;
    for (const auto& [index, chunk] : loan.chunks)
      if (chunk.is_lent) overdue.push_back({index, false, 0, {}});
    take_back(ticket, loan, overdue);
  }
}

}  // namespace kvferry
