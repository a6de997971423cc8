#include "connector/runtime/worker/slot_grants.h"

#include <string>
#include <vector>

namespace kvferry {

void SlotGrants::grant(const GrantOrder& order) {
  GrantOutcome outcome{order.ticket, parts_.core.rank(), {}};
  for (const GrantedChunk& wanted : order.chunks) {
    parts_.core.locked([&](WorkerCore& core) { core.begin_write(wanted.chunk); });
    GrantedSlot slot{wanted.chunk, {}, false, {}};
    const std::uint64_t bytes = wanted.num_tokens * parts_.bytes_per_token;
    std::string name;  // stays empty if the memory can't be granted
    if (const auto place = parts_.store.land(wanted.chunk, bytes)) {
      slot.has_place = true;
      if (place->region == parts_.pool_region) {  // a grant on other memory could not be revoked
        if (const auto grant = parts_.transport.grant(place->region, place->offset, bytes)) {
          slot.grant = *grant;
          if (auto exported = parts_.transport.export_grant(*grant)) name = std::move(*exported);
        }
      }
    }
    outcome.grants.push_back(std::move(name));
    slots_.emplace(Key{order.ticket, wanted.index}, std::move(slot));
  }
  send_(seal(0, outcome));
}

void SlotGrants::revoke(const Revocation& order) {
  for (const RevokedChunk& chunk : order.chunks) {
    const Key key{order.ticket, chunk.index};
    const auto found = slots_.find(key);
    if (found == slots_.end()) continue;
    found->second.revoking = chunk;
    take_back(key, found->second);
  }
}

/// Revokes the grant of a slot; then the store may copy the chunk to where other nodes read it.
void SlotGrants::take_back(const Key& key, GrantedSlot& slot) {
  if (slot.grant) {
    const Result<void> revoked = parts_.transport.revoke(*slot.grant);
    if (!revoked && revoked.error().code == ErrorCode::kFull) {
      revoking_.insert(key);
      return;
    }
    revoking_.erase(key);
    slot.grant.reset();
  }
  if (!slot.has_place) return end(key, false);
  const std::uint32_t rank = parts_.core.rank();
  RevokedChunk& chunk = *slot.revoking;
  chunk.ok = chunk.ok && rank < chunk.checksums.size();
  const ChunkStore::Landed landed{slot.chunk, chunk.ok, chunk.ok ? chunk.checksums[rank] : 0};
  landing_[slot.chunk] = key;
  parts_.store.landed({&landed, 1});
}

bool SlotGrants::landed(const ChunkStore::Landed& chunk) {
  const auto found = landing_.find(chunk.chunk);
  if (found == landing_.end()) return false;
  const Key key = found->second;
  landing_.erase(found);
  end(key, chunk.ok);
  return true;
}

void SlotGrants::end(const Key& key, bool ok) {
  const auto slot = slots_.find(key);
  RevokedChunk& chunk = *slot->second.revoking;
  chunk.ok = chunk.ok && ok;
  parts_.core.locked([&](WorkerCore& core) { core.end_write(chunk.chunk, chunk.ok); });
  Revoked& outcome = outcomes_[key.first];
  outcome.ticket = key.first;
  outcome.rank = parts_.core.rank();
  outcome.chunks.push_back(std::move(chunk));
  slots_.erase(slot);
}

bool SlotGrants::progress() {
  for (const Key& key : std::set(revoking_)) take_back(key, slots_.at(key));
  const bool has_outcomes = !outcomes_.empty();
  for (const auto& [ticket, outcome] : std::exchange(outcomes_, {})) send_(seal(0, outcome));
  return has_outcomes;
}

}  // namespace kvferry
