#include "handoffs.h"

#include <algorithm>

namespace kvferry::sim {
namespace {

// limit on the time from a message to the actions that it caused, which are carried out in the core's next step
constexpr TimeNs kNoticed = 20 * kMillisecond;

}  // namespace

void Mishaps::to_chunks(Kind kind, std::size_t node, std::span<const ChunkKey> chunks, TimeNs when, TimeNs end) {
  for (const ChunkKey& chunk : chunks) by_chunk_[chunk].push_back({kind, node, when, end});
}

void Mishaps::to_link(Kind kind, std::size_t node, std::size_t other, TimeNs when) {
  by_link_[{node, other}].push_back({kind, node, when, when});
}

bool Mishaps::has(Kind kind, std::size_t node, std::size_t other, TimeNs from, TimeNs until) const {
  const auto found = by_link_.find({node, other});
  return found != by_link_.end() && std::ranges::any_of(found->second, [&](const Mishap& mishap) {
           return mishap.kind == kind && mishap.when >= from && mishap.when <= until;
         });
}

Mishaps::Kind Mishaps::to_chunk_at(const Handoff& handoff, std::size_t chunk, std::size_t node, TimeNs from,
                                   TimeNs until) const {
  const auto found = by_chunk_.find(handoff.chunks.at(chunk).key);
  if (found == by_chunk_.end()) return nullptr;
  const auto excuses = [&](const Mishap& mishap) {
    if (mishap.node != node || mishap.when > until || mishap.end < from) return false;
    const bool has_waited = until - handoff.handed >= handoff.longest_wait;
    return mishap.kind != &Tally::excused_time_over || (has_waited && mishap.end + kNoticed > until);
  };
  const auto mishap = std::ranges::find_if(found->second, excuses);
  return mishap == found->second.end() ? nullptr : mishap->kind;
}

Mishaps::Kind Mishaps::excuse(const Handoff& handoff, std::size_t chunk, TimeNs until) const {
  const std::size_t from = handoff.from, to = handoff.to;
  until += kNoticed;
  const AtPrefill at_prefill = handoff.at_prefill[chunk];
  if (at_prefill == AtPrefill::kPulled) return &Tally::excused_pulled;
  if (at_prefill == AtPrefill::kFailing) return &Tally::excused_save_failed;
  for (const std::size_t node : {from, to})
    if (has(&Tally::excused_purged, node, node, 0, until)) return &Tally::excused_purged;
  if (at_prefill == AtPrefill::kMissing) {
    if (const Kind kind = to_chunk_at(handoff, chunk, from, handoff.asked, handoff.handed + kNoticed)) return kind;
    if (handoff.is_uncached) return &Tally::excused_damaged;
    return has(&Tally::excused_no_slot, from, from, handoff.asked, handoff.handed) ? &Tally::excused_no_slot : nullptr;
  }
  for (const std::size_t node : {from, to})
    if (has(&Tally::excused_died, node, node, handoff.handed, until)) return &Tally::excused_died;
  for (const std::size_t node : {from, to})
    if (const Kind kind = to_chunk_at(handoff, chunk, node, handoff.handed, until)) return kind;
  if (has(&Tally::excused_no_slot, to, to, handoff.handed, until)) return &Tally::excused_no_slot;
  const bool is_suspect = handoff.is_suspect || has(&Tally::excused_suspected, to, from, handoff.handed, until);
  if (is_suspect) return &Tally::excused_suspected;
  for (std::size_t other = 0; other < handoff.chunks.size(); ++other) {
    const Kind kind = to_chunk_at(handoff, other, to, handoff.handed, until);
    if (kind == &Tally::excused_late || kind == &Tally::excused_blocked) return &Tally::excused_behind;
  }
  return nullptr;
}

}  // namespace kvferry::sim
