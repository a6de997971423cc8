// Preparations (preparation.h): when they begin, which requests wait for them, and how they end.
#include <algorithm>
#include <utility>

#include "connector/core/promises.h"
#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry {

/// Returns true if the chunk is complete or may become complete.
static bool is_coming(const ChunkPool::Slot* slot) {
  return slot != nullptr && !slot->write_failed &&
         (slot->state == ChunkPool::State::kWriting || slot->state == ChunkPool::State::kReady);
}

static bool are_ready(const ChunkPool& pool, const std::vector<ChunkRef>& chunks) {
  return std::ranges::all_of(chunks,
                             [&](ChunkRef chunk) { return pool.slot(chunk.slot).state == ChunkPool::State::kReady; });
}

/// Answers the lookup of a preparation. The preparation can begin only if each chunk of its prompt is in the pool or is
/// being written, and at least one is being written: otherwise a preparation would save no time. While a chunk is
/// missing, the lookup stays pending. A preparation that can't begin although no chunk is missing stays pending until
/// it is aborted.
Answer SchedulerCore::lookup_preparation(RequestState& request, std::uint32_t num_local, TimeNs now) {
  const Answer pending{true, 0, false, true};
  if (request.running) release_blocks(request);
  end_attempt(request);
  request.async_load = RequestState::AsyncLoad::kNone;
  const std::uint32_t hit = request.chain.size() - 1;
  if (!request.cacheable || num_local >= hit) return pending;
  OpenLookup open{hit, num_local, hit - num_local, {}, {}, purge_.num_of_engine};
  bool is_complete = true;
  for (const ChunkMeta& chunk : request.chain.prefix(hit)) {
    const ChunkPool::Slot* slot = find_chunk(chunk.key, chunk.num_tokens);
    if (!is_coming(slot)) return pending;
    is_complete &= slot->state == ChunkPool::State::kReady;
    open.chunks.push_back(slot->ref);
  }
  std::uint64_t num_open_tokens = 0;
  for (const Preparation& other : preparations_) num_open_tokens += other.num_tokens;
  if (is_complete || !may_prepare(hit, preparations_.size(), num_open_tokens, config_.prepared_tokens_max)) {
    counters_.preparations_refused += 1;
    request.cacheable = false;
    return pending;
  }
  promise::sane_counts(num_local, open.num_external, request.chain.size(), request.id.value);
  counters_.lookups += 1;
  request.attempt_open = true;
  request.attempt.value += 1;
  request.wait_deadline = now + config_.load_timeout;
  record_answer(request, open);
  const Answer answer{false, open.num_external, true};
  request.open_lookup = std::move(open);
  open_lookups_.insert(request.id);
  return answer;
}

/// `load` is the load of `job`. It has no pin yet: end_preparation() pins the chunks once all of them are ready.
void SchedulerCore::begin_preparation(const RequestState& request, LoadJob job, PendingLoad load) {
  const OpenLookup& open = *request.open_lookup;
  const TimeNs now = load.began;
  load.is_prepared = true;
  load.is_verified = false;
  loads_[{job.request_id, job.attempt}] = std::move(load);
  for (LoadItem& item : job.items) item.checksums.clear();
  Preparation made{
      std::move(job),  open.chunks,           pool_.slot(open.chunks.back().slot).meta.key, open.hit, open.num_local,
      open.num_purges, now + config_.push_ttl};
  promise::bounded_hold(now, made.deadline, "preparation " + request.id.value);
  preparations_.push_back(std::move(made));
}

/// Returns the answer to the lookup of a request that begins with the prompt of a preparation: pending, until the
/// preparation has ended or is abandoned. Returns nullopt if no preparation would help the request.
std::optional<Answer> SchedulerCore::wait_for_preparation(RequestState& request, std::uint32_t num_local) {
  for (Preparation& preparation : preparations_) {
    const bool was_abandoned = preparation.is_ending && !preparation.is_wanted;
    if (was_abandoned || preparation.num_tokens > request.chain.size() ||
        num_local + block_tokens_ > preparation.num_tokens ||
        request.chain.prefix(preparation.num_tokens).back().key != preparation.last)
      continue;
    preparation.is_wanted = true;
    record_wait(request);
    return Answer{true, 0, false, are_ready(pool_, preparation.chunks)};
  }
  return std::nullopt;
}

bool SchedulerCore::awaits_prepared_chunks() const {
  return std::ranges::any_of(preparations_, [&](const Preparation& preparation) {
    return !preparation.is_ending && !are_ready(pool_, preparation.chunks);
  });
}

bool SchedulerCore::is_lost(const Preparation& preparation, TimeNs now) const {
  const auto is_gone = [&](ChunkRef chunk) {
    const ChunkPool::Slot& slot = pool_.slot(chunk.slot);
    return slot.ref != chunk || !is_coming(&slot);
  };
  return now >= preparation.deadline || !preparation.has_request || std::ranges::any_of(preparation.chunks, is_gone);
}

/// Plans what the step does for preparations. `lacks_blocks`: the engine has too few blocks for its requests, so that
/// preparations have to give theirs back.
void SchedulerCore::advance_preparations(bool lacks_blocks, TimeNs now, StepPlan& plan) {
  for (Preparation& preparation : preparations_) {
    if (preparation.is_ending) continue;
    const bool is_new = !std::exchange(preparation.is_planned, true);
    if (lacks_blocks || is_lost(preparation, now)) {
      counters_.preparations_abandoned += 1;
      preparation.is_ending = true;
      preparation.is_wanted = false;
      plan.abandoned.push_back(preparation.job);
      continue;
    }
    if (is_new) plan.ahead.push_back(preparation.job);
    if (preparation.is_wanted && are_ready(pool_, preparation.chunks)) end_preparation(preparation, now, plan);
  }
}

/// Plans the end of the preparation's load, with the checksums of its chunks.
void SchedulerCore::end_preparation(Preparation& preparation, TimeNs now, StepPlan& plan) {
  RequestState& request = requests_.at(RequestId{preparation.job.request_id});
  LoadJob job = preparation.job;
  for (LoadItem& item : job.items) {
    const ChunkPool::Slot& slot = pool_.slot(item.chunk.slot);
    promise::verified_only(slot.ref == item.chunk && slot.state == ChunkPool::State::kReady, slot.checksums.size(),
                           config_.num_ranks, item.chunk.slot);
    item.checksums = slot.checksums;
  }
  PendingLoad& load = loads_.at({job.request_id, job.attempt});
  load.pin = pool_.pin(preparation.chunks, "load for " + job.request_id, now, now + config_.pin_ttl);
  load.is_verified = true;
  pool_.touch(preparation.chunks);
  // The givers of a pushed chunk are known only when the chunk has arrived.
  note_givers(request, preparation.chunks, preparation.num_local, preparation.num_tokens, preparation.num_purges);
  preparation.is_ending = true;
  plan.loads.push_back(std::move(job));
}

}  // namespace kvferry
