#include "connector/runtime/worker/slot_grants.h"

#include <bit>
#include <string>
#include <vector>

#include "transport/base/log.h"

namespace kvferry {

void SlotGrants::grant(const GrantOrder& order) {
  const GrantTerms terms{.reads = false, .writes = true, .lasts_ns = order.lasts_ns, .member = order.member};
  GrantOutcome outcome{order.reservation, parts_.core.rank(), {}};
  for (const GrantedChunk& wanted : order.chunks) {
    const auto [slot, is_new] =
        slots_.try_emplace(Key{order.reservation, wanted.index}, GrantedSlot{wanted.chunk, {}, false, false, {}});
    outcome.grants.push_back(is_new ? grant(wanted, terms, slot->second) : std::string());
  }
  send_(seal(0, outcome));
}

/// Returns the exported grant, or an empty text if the memory can't be granted.
std::string SlotGrants::grant(const GrantedChunk& wanted, const GrantTerms& terms, GrantedSlot& slot) {
  slot.has_begun = parts_.fits(wanted.chunk, wanted.num_tokens) && parts_.core.locked([&](WorkerCore& core) {
    const bool is_writable = core.writable(wanted.chunk);
    if (is_writable) core.begin_write(wanted.chunk);
    return is_writable;
  });
  if (!slot.has_begun) {
    log().error(
        "refused an order to grant pool slot {} for {} tokens: there is no such slot, or the slot is too small, is "
        "being written, or was reused",
        wanted.chunk.slot, wanted.num_tokens);
    return {};
  }
  Result<std::string> exported = grant_place(wanted, terms, slot);
  if (exported) return std::move(*exported);
  if (std::has_single_bit(++num_not_granted_))
    log().warn(
        "slot {} can't be granted to a node that pushes, so its chunk has to be pulled ({} such slots so far): {}",
        wanted.chunk.slot, num_not_granted_, exported.error().what);
  return {};
}

Result<std::string> SlotGrants::grant_place(const GrantedChunk& wanted, const GrantTerms& terms, GrantedSlot& slot) {
  const std::uint64_t bytes = wanted.num_tokens * parts_.bytes_per_token;
  // The place is in the slot, not in a frame, because a grant of GPU memory could not be revoked.
  const ChunkStore::Place place = KVFERRY_TRY(parts_.store.land_in_slot(wanted.chunk, bytes));
  slot.has_place = true;
  if (place.region != parts_.pool_region) return std::string();
  slot.grant = KVFERRY_TRY(parts_.transport.grant(place.region, place.offset, bytes, terms));
  return parts_.transport.export_grant(*slot.grant);
}

void SlotGrants::revoke(const Revocation& order) {
  for (const RevokedChunk& chunk : order.chunks) {
    const Key key{order.reservation, chunk.index};
    const auto found = slots_.find(key);
    if (found == slots_.end() || found->second.revoking) continue;
    found->second.revoking = chunk;
    found->second.revoking->chunk = found->second.chunk;
    take_back(key, found->second);
  }
}

/// Revokes the grant of a slot, and then passes the chunk to the store, which may copy it to the place where other
/// nodes read it.
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
  if (chunk.is_in_frame) return true;  // the chunk is reported once more when its slot is written
  const Key key = found->second;
  landing_.erase(found);
  end(key, chunk.ok);
  return true;
}

void SlotGrants::end(const Key& key, bool ok) {
  const auto slot = slots_.find(key);
  RevokedChunk& chunk = *slot->second.revoking;
  chunk.ok = chunk.ok && ok;
  if (slot->second.has_begun) parts_.core.locked([&](WorkerCore& core) { core.end_write(chunk.chunk, chunk.ok); });
  Revoked& outcome = outcomes_[key.first];
  outcome.reservation = key.first;
  outcome.rank = parts_.core.rank();
  outcome.chunks.push_back(std::move(chunk));
  slots_.erase(slot);
}

bool SlotGrants::progress() {
  for (const Key& key : std::set(revoking_)) take_back(key, slots_.at(key));
  const bool has_outcomes = !outcomes_.empty();
  for (const auto& [reservation, outcome] : std::exchange(outcomes_, {})) send_(seal(0, outcome));
  return has_outcomes;
}

}  // namespace kvferry
