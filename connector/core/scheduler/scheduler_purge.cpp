// The controller's order to purge the KV that came from a node or a member, and the record of each request's givers:
// the nodes and members from which its KV came.
#include <utility>

#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry {

/// Adds the givers of the KV that a request was just admitted with: of the chunks that it loads, and of those that the
/// engine's own prefix cache has because an earlier request loaded them. `chunks`: the chunks from the first token on;
/// the request has the first `num_local` tokens from the engine's cache, and those up to `end` from the chunks.
/// `num_purges`: Purge::num_of_engine when the chunks were found.
void SchedulerCore::note_givers(RequestState& request, std::span<const ChunkRef> chunks, std::uint32_t num_local,
                                std::uint32_t end, std::uint64_t num_purges) {
  TokenChain& chain = request.chain;
  const bool has_loaded = provenance_.has_loaded();
  const auto parent = [&](std::uint32_t i) -> const ChunkKey& { return i == 0 ? chain.root() : chain.key(i - 1); };
  const auto add_loaded_at = [&](const ChunkKey& place) {
    const Givers* const givers = provenance_.loaded_at(place);
    if (givers != nullptr) add_givers(request.givers, *givers);
    return givers != nullptr;
  };
  // If the engine's KV was purged since the tokens and chunks were found, they may be from the purged node.
  if (num_purges != purge_.num_of_engine) request.cacheable = false;
  std::uint32_t start = 0;
  for (const ChunkRef chunk : chunks) {
    const ChunkPool::Slot& slot = pool_.slot(chunk.slot);
    if (start >= end) break;
    add_givers(request.givers, slot.givers);
    start += slot.meta.num_tokens;
    if (start <= num_local || slot.givers.empty()) continue;
    if (!slot.meta.is_tail) {
      provenance_.loaded(slot.meta.key, slot.givers);
    } else {
      const std::uint32_t num_before = (start - slot.meta.num_tokens) / chain.chunk_tokens();
      const auto group = chain.tail_group(num_before);
      provenance_.loaded(after(parent(num_before)), group ? Givers{} : slot.givers);
      if (group) provenance_.loaded(*group, slot.givers);
    }
  }
  for (std::uint32_t i = 0; has_loaded && i * chain.chunk_tokens() < num_local; ++i) {
    if (i < chain.num_full_chunks()) add_loaded_at(chain.key(i));
    if (!add_loaded_at(after(parent(i)))) continue;
    if (const auto group = chain.tail_group(i)) add_loaded_at(*group);
  }
  end_sharing_if_purged(request);
}

/// If some KV of the request came from a purged node, or was computed from such KV, nothing more is loaded or saved for
/// the request.
void SchedulerCore::end_sharing_if_purged(RequestState& request) {
  if (!provenance_.is_purged(request.givers)) return;
  request.cacheable = false;
}

void SchedulerCore::purge_ordered(std::uint64_t id, const std::string& giver, TimeNs now) {
  now_ = now;
  const bool is_member = giver.starts_with(kMemberPrefix);
  const std::string name = giver.substr(is_member ? kMemberPrefix.size() : 0);
  const std::string_view kind = is_member ? "member" : "node";
  const bool is_own = is_member ? !name.empty() && name == config_.member : name == config_.endpoint;
  if (!provenance_.purge(giver, id, now + config_.order_ttl_max)) return;
  if (std::exchange(purge_.id, id) != id) purge_.num_chunks = purge_.num_bytes = 0;
  std::uint64_t num_dropped = 0;
  for (std::uint32_t i = 0; i < pool_.num_slots(); ++i) {
    const ChunkPool::Slot& slot = pool_.slot(i);
    const std::uint64_t num_bytes = config_.bytes_of(slot.meta.num_tokens);
    if (!is_own && !provenance_.is_purged(slot.givers)) continue;
    if (slot.state == ChunkPool::State::kReady)
      pool_.invalidate(slot.ref);
    else if (slot.state == ChunkPool::State::kWriting && !slot.write_failed)
      pool_.fail_write(slot.ref);
    else
      continue;
    num_dropped += 1;
    purge_.num_bytes += num_bytes;
  }
  purge_.num_chunks += num_dropped;
  counters_.purged_chunks += num_dropped;
  for (auto& [request_id, request] : requests_) {
    const bool has_kv = request.running || request.async_load != RequestState::AsyncLoad::kNone;
    if (is_own && has_kv) add_givers(request.givers, {giver});
    end_sharing_if_purged(request);
  }
  purge_.num_of_engine += (provenance_.drop_loaded_if_purged() || is_own) ? 1 : 0;
  actions_.push_back(LogLine{
      fmt::format("on the controller's order, purged {} chunks with KV of {} {} or of unknown nodes, or computed from "
                  "such KV; no more KV of the named {} is accepted for a day, or until it has restarted",
                  num_dropped, kind, name.substr(0, 256), kind),
      true});
  announce_evictions();
}

}  // namespace kvferry
