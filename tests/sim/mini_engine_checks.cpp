// Checks for which the core lacks knowledge: whose blocks a save reads, and what the workers hold of a chunk.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "mini_engine.h"

namespace kvferry::sim {

/// Returns the number of tokens whose KV is in the request's blocks. This differs from `computed`, which counts drafts
/// as accepted, and the cell of the last sampled token may hold a rejected draft.
std::uint32_t MiniEngine::truly_computed(const Request& request) const {
  return std::min(request.computed, request.sampled - 1);
}

/// Saves after this step read the blocks of requests in the step. Saves before it read blocks that requests have lost
/// since the last step.
void MiniEngine::check_saves(const StepPlan& plan, const StepInput& input) {
  for (const SaveJob& job : plan.saves_before) {
    const auto lost = lost_.find(job.request_id);
    if (lost == lost_.end())
      throw Broken(fmt::format("saved-is-computed: step {} saves what {} lost, which has lost nothing", plan.step,
                               job.request_id));
    promises_.save_planned(job, lost->second.table, lost->second.computed, lost->second.known);
    tally_.saves_of_lost += 1;
  }
  lost_.clear();
  for (const SaveJob& job : plan.saves_after) {
    const auto is_its = [&](const ScheduledRequest& row) { return row.id.value == job.request_id; };
    const auto row = std::find_if(input.scheduled.begin(), input.scheduled.end(), is_its);
    if (row == input.scheduled.end())
      throw Broken(
          fmt::format("saved-is-computed: step {} saves from {}, which is not in it", plan.step, job.request_id));
    const Request& request = requests_.at(job.request_id);
    promises_.save_planned(job, request.table, row->num_computed + row->num_scheduled, request.known);
  }
}

void MiniEngine::check_published(const ChunkMeta& chunk) {
  tally_.window_chunks += chunk.window_from > 0;
  const ChunkPool::Slot* slot = core_.pool().find(chunk.key);
  if (slot == nullptr || slot->state != ChunkPool::State::kReady)
    throw Broken("verified-only: a chunk is published that the pool does not have");
  for (std::size_t rank = 0; rank < workers_.size(); ++rank) {
    const Worker& worker = workers_[rank];
    tally_.published_damaged += worker.damaged(slot->ref.slot);
    if (worker.is_in_frame_only(slot->ref.slot))
      throw Broken(
          fmt::format("verified-only: slot {} is published, but its chunk is in a frame only", slot->ref.slot));
    if (worker.slot_checksum(slot->ref.slot) != slot->checksums[rank])
      throw Broken(fmt::format("verified-only: slot {} is published with a wrong checksum", slot->ref.slot));
    tally_.forged += worker.is_forged(slot->ref.slot);
    if (worker.is_forged(slot->ref.slot)) continue;
    const std::vector<Stamp> plain = worker.plain(slot->ref.slot);
    book_.check_chunk(chunk.key, plain);
    if (const auto wrong = worker.find_wrong(slot->ref.slot, plain))
      throw Broken(fmt::format("saved-is-computed: published chunk {} holds something wrong at {}", chunk.key, *wrong));
  }
}

void MiniEngine::check_put_together(const ChunkKey& key, std::uint32_t slot, std::uint32_t rank) const {
  const Worker& worker = workers_[rank];
  if (worker.is_forged(slot)) return;
  const std::vector<Stamp>* const known = book_.find(key);
  if (const auto wrong = worker.find_wrong(slot, known != nullptr ? *known : worker.plain(slot)))
    throw Broken(
        fmt::format("verified-only: what rank {} has put together from runs of states holds something wrong "
                    "at {}",
                    rank, *wrong));
}

void MiniEngine::check_published() {
  for (Action& action : core_.take_actions()) {
    if (const auto* published = std::get_if<PublishChunks>(&action))
      for (const ChunkMeta& chunk : published->chunks) check_published(chunk);
    actions_.push_back(std::move(action));
  }
}

std::vector<Action> MiniEngine::take_actions() {
  check_published();
  return std::exchange(actions_, {});
}

Tally MiniEngine::tally() const {
  Tally tally = tally_;
  const CoreCounters& counters = core_.counters();
  tally.saves_failed += counters.save_failures;
  tally.evictions += counters.evicted_chunks;
  tally.purged_chunks += counters.purged_chunks;
  tally.evicted_for_tenants += counters.evicted_for_tenants;
  tally.pool_full += counters.pool_full;
  tally.pulled_chunks += counters.pulled_chunks;
  tally.pushed_chunks += counters.pushed_chunks;
  tally.announced_chunks += counters.announced_chunks;
  tally.push_failures += counters.push_failures;
  tally.received_chunks += counters.received_chunks;
  tally.mislabeled += counters.mislabeled_chunks;
  tally.pull_failures += counters.pull_failures;
  tally.suspected += counters.holders_suspected;
  tally.writes_abandoned += counters.writes_abandoned;
  tally.fetch_timeouts += counters.fetch_timeouts;
  tally.leases += counters.leases_granted;
  tally.pins_expired += counters.pins_expired;
  return tally;
}

void MiniEngine::check_idle() const {
  PromisesCheck::idle(core_);
  if (core_.counters().loaded_tokens != loaded_tokens_)
    throw Broken(fmt::format("sane-counts: {} tokens were loaded, the counter says {}", loaded_tokens_,
                             core_.counters().loaded_tokens));
  if (!held_back_.empty())
    throw Broken(fmt::format("exactly-once: {} aborted loads are never heard of", held_back_.size()));
  if (blocks_.num_free() != blocks_.num_usable())
    throw Broken(fmt::format("bounded-hold: idle with {} of {} blocks free", blocks_.num_free(), blocks_.num_usable()));
}

}  // namespace kvferry::sim
