// A request's admission: lookup, allocation, the plan of its load.
#include <algorithm>
#include <utility>

#include "connector/core/promises.h"
#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry {

/// Returns the longest prefix of the request that is in the pool.
Coverage SchedulerCore::cover(RequestState& request) {
  Coverage coverage;
  TokenChain& chain = request.chain;
  std::uint32_t i = 0;
  for (; i < chain.num_full_chunks(); ++i) {
    const ChunkPool::Slot* slot = find_chunk(chain.key(i), chain.chunk_tokens());
    if (slot == nullptr || slot->state != ChunkPool::State::kReady) {
      coverage.growing = slot != nullptr;
      break;
    }
    coverage.chunks.push_back(slot->ref);
  }
  coverage.tokens = i * chain.chunk_tokens();
  // A tail may follow these full chunks: a tail of their tail group, or a tail whose end is known from this request's
  // last save or from the handoff source.
  const ChunkPool::Slot* best = nullptr;
  const auto consider = [&](const ChunkPool::Slot* slot) {
    if (slot == nullptr || (best != nullptr && slot->meta.num_tokens <= best->meta.num_tokens)) return;
    if (slot->state == ChunkPool::State::kReady) best = slot;
    if (slot->state == ChunkPool::State::kWriting) coverage.growing = true;
  };
  const std::uint32_t left = chain.size() - coverage.tokens;
  if (const auto group = chain.tail_group(i)) {
    for (const ChunkPool::Slot* slot : pool_.tails(*group)) {
      const std::uint32_t n = slot->meta.num_tokens;
      if (n <= left && chain.tail_key(i, n) == slot->meta.key) consider(slot);
    }
  }
  const auto exact = [&](std::uint32_t end) {
    if (end > coverage.tokens && end <= chain.size() && end - coverage.tokens < chain.chunk_tokens())
      consider(find_chunk(chain.tail_key(i, end - coverage.tokens), end - coverage.tokens));
  };
  exact(request.last_tail_end);
  if (request.source) exact(request.source->num_tokens);
  if (best != nullptr) {
    coverage.chunks.push_back(best->ref);
    coverage.tokens += best->meta.num_tokens;
  }
  for (std::uint32_t chunk = 0; chunk < coverage.chunks.size(); ++chunk)
    name_chunk(request, coverage.chunks[chunk], chunk * config_.chunk_tokens);
  return coverage;
}

/// Returns how many of the first `num_tokens` tokens can be saved and reused. With CoreConfig::whole_blocks these are
/// the tokens of the blocks that are full in all KV groups.
std::uint32_t SchedulerCore::reusable(std::uint32_t num_tokens) const { return num_tokens - num_tokens % unit(); }

/// Returns true if chunks from other nodes could lengthen the hit.
bool SchedulerCore::could_grow(const RequestState& request, const Coverage& coverage, std::uint32_t num_local) const {
  const std::uint32_t most = reusable(request.chain.size() - 1);
  std::uint32_t hit = reusable(std::min(coverage.tokens, most));
  if (config_.keeps_state) hit = fit_windows(coverage.chunks, hit, num_local);
  return std::max(hit, num_local) < most;
}

/// Returns the first token of the first block that a group's layers still need once `end` tokens are computed: 0 for a
/// group without a window. For models with state: the first token of the block that has the state after `end` tokens.
std::uint32_t SchedulerCore::window_start(std::size_t group, std::uint32_t end) const {
  const KvGroup& own = config_.groups[group];
  if (own.window == 0) return 0;
  if (config_.keeps_state) return end == 0 ? 0 : reusable(end - 1);
  const std::uint32_t first_attended = own.window_restarts ? end - end % own.window
                                       : end < own.window  ? 0
                                                           : end + 1 - own.window;
  return first_attended - first_attended % own.block_tokens;
}

/// Returns true if a chunk, whose first token is `chunk_start`, lacks no KV that the windows at the end of a hit of
/// `end` tokens need. KV of the first num_local tokens is in the engine's cache, and not needed from the chunk.
bool SchedulerCore::has_windows(const ChunkMeta& chunk, std::uint32_t chunk_start, std::uint32_t num_local,
                                std::uint32_t end) const {
  if (chunk.window_from == 0 || chunk_start >= end) return true;
  for (std::size_t group = 0; group < config_.groups.size(); ++group) {
    if (config_.groups[group].window == 0 || chunk.from(group) == 0) continue;
    if (std::max(num_local, window_start(group, end)) < chunk_start + chunk.from(group)) return false;
  }
  return true;
}

/// Shortens a hit until all tokens that the windows at its end attend to are in the engine's cache or in a chunk.
/// Returns the number of tokens in the shortened hit.
std::uint32_t SchedulerCore::fit_windows(std::span<const ChunkRef> chunks, std::uint32_t hit,
                                         std::uint32_t num_local) const {
  if (num_local != reusable(num_local)) return num_local;  // a load of whole blocks begins at a block's start
  while (hit > num_local) {
    std::uint32_t fits = hit;
    std::uint32_t chunk_start = 0;
    for (const ChunkRef chunk : chunks) {
      const ChunkMeta& meta = pool_.slot(chunk.slot).meta;
      // If a chunk lacks KV of needed tokens, no hit can end inside that chunk: the hit must end before the chunk.
      if (!has_windows(meta, chunk_start, num_local, hit)) fits = chunk_start;
      chunk_start += meta.num_tokens;
    }
    if (fits == hit) break;
    hit = fits;
  }
  return hit;
}

Answer SchedulerCore::lookup(const RequestId& id, std::uint32_t num_local, TimeNs now) {
  now_ = now;
  RequestState* found = find(id);
  if (found == nullptr) return {};
  RequestState& request = *found;
  if (request.prepares) return lookup_preparation(request, num_local, now);
  if (!request.cacheable) {
    if (request.yield_in_step == step_ + 1) return {true, 0};
    open_lookups_.insert(id);
    return {};
  }
  if (request.running) release_blocks(request);  // the request was preempted, which build_step() learns later
  request.async_load = RequestState::AsyncLoad::kNone;
  if (request.open_lookup) {
    // A second lookup in one step returns the stored hit, minus the tokens that the engine has in its own cache now.
    OpenLookup& open = *request.open_lookup;
    std::uint32_t pinned = 0;
    for (const ChunkRef chunk : open.chunks)
      pinned += pool_.slot(chunk.slot).ref == chunk ? pool_.slot(chunk.slot).meta.num_tokens : 0;
    if (!open.chunks.empty())
      promise::idempotent_lookup(open.hit, reusable(std::min(pinned, request.chain.size() - 1)), id.value);
    const std::uint32_t usable = request.is_recomputed() ? 0 : fit_windows(open.chunks, open.hit, num_local);
    open.num_local = num_local;
    open.num_external = usable > num_local ? usable - num_local : 0;
    return {false, open.num_external, open.num_external > 0 && loads_async()};
  }
  counters_.lookups += 1;
  if (!request.attempt_open) {
    request.attempt_open = true;
    request.attempt.value += 1;
    request.wait_deadline = now + config_.load_timeout;
  }
  if (request.yield_in_step == step_ + 1) return {true, 0};
  if (!preparations_.empty() && now < request.wait_deadline)
    if (const auto later = wait_for_preparation(request, num_local)) return *later;
  Coverage coverage = cover(request);
  const bool more_could_help = could_grow(request, coverage, num_local);
  const bool is_first = !request.fetched && now >= request.next_fetch_at;
  if (!request.fetch && more_could_help && (is_first || is_source_next(request))) start_fetch(request, now);
  if ((request.fetch || coverage.growing || request.source_left) && more_could_help) {
    record_wait(request);
    if (now < request.wait_deadline) return {true, 0};
    counters_.fetch_timeouts += 1;
    blame_wait(request);
  }
  return answer(request, coverage, num_local, now);
}

Answer SchedulerCore::answer(RequestState& request, const Coverage& coverage, std::uint32_t num_local, TimeNs now) {
  // A load must leave at least one token for the engine to compute.
  const std::uint32_t hit = reusable(std::min(coverage.tokens, request.chain.size() - 1));
  const std::uint32_t usable = request.is_recomputed() ? 0 : fit_windows(coverage.chunks, hit, num_local);
  OpenLookup open;
  open.hit = hit;
  open.num_local = num_local;
  open.num_purges = purge_.num_of_engine;
  open.num_external = usable > num_local ? usable - num_local : 0;
  promise::sane_counts(num_local, open.num_external, request.chain.size(), request.id.value);
  if (hit > 0) {
    // The chunks are pinned even if the engine needs none of them now: before a second lookup in this step the engine
    // may evict its own blocks.
    open.chunks = coverage.chunks;
    open.pin = pool_.pin(coverage.chunks, "lookup of " + request.id.value, now, now + config_.pin_ttl);
    pool_.touch(coverage.chunks);
  }
  if (open.num_external > 0) counters_.lookup_hits += 1;
  const Answer answer{false, open.num_external, open.num_external > 0 && loads_async()};
  record_answer(request, open);
  request.open_lookup = std::move(open);
  open_lookups_.insert(request.id);
  return answer;
}

/// Erases the open lookup. Every attempt ends in this function, whether the request was admitted or not.
void SchedulerCore::end_attempt(RequestState& request) {
  if (request.open_lookup) {
    pool_.unpin(request.open_lookup->pin);
    request.open_lookup.reset();
  }
  open_lookups_.erase(request.id);
  request.attempt_open = false;
  request.fetched = false;
}

void SchedulerCore::allocated(const RequestId& id, std::uint32_t num_external, const BlockTable& blocks, TimeNs now) {
  now_ = now;
  RequestState* found = find(id);
  if (found == nullptr) return;
  RequestState& request = *found;
  // If the request still counts as running, it was preempted, and lookup() has not released its old blocks.
  if (request.running) release_blocks(request);
  const bool continues = num_external == 0 && request.async_load == RequestState::AsyncLoad::kDone;
  request.async_load = RequestState::AsyncLoad::kNone;
  request.blocks = blocks;
  request.admitted_in = step_ + 1;
  drop_source(request);
  if (continues) {  // the request's asynchronous load has ended, so this is no new admission
    request.skip_external_until_admitted = false;
    request.running = true;
    return;
  }
  // lookup() opens no attempt for a request that is not cacheable, and vLLM may not have called lookup().
  if (!request.attempt_open) request.attempt.value += 1;
  Admission admission;
  admission.attempt = request.attempt.value;
  admission.resumed = request.preemptions > 0;
  admission.tokens = request.chain.size();
  if (request.open_lookup) {
    admission.local = request.open_lookup->num_local;
    admission.hit = std::max(request.open_lookup->hit, admission.local);
    admission.to_load = num_external;
  }
  const bool is_async = num_external > 0 && is_load_async(request);
  if (num_external > 0) {
    LoadJob job = plan_load(request, num_external, blocks);
    PendingLoad load{{}, {}, admission, false, request.record, now};
    load.admission.loaded = num_external;
    if (request.prepares) {
      begin_preparation(request, std::move(job), std::move(load));
    } else {
      load.pin = pool_.pin(request.open_lookup->chunks, "load for " + id.value, now, now + config_.pin_ttl);
      loads_[{id.value, job.attempt}] = std::move(load);
      loads_next_.push_back(std::move(job));
    }
    counters_.loads += 1;
  }
  // Hits are counted here, once per admission, because the engine may repeat a lookup.
  counters_.hit_tokens += num_external;
  if (admission.resumed) {
    counters_.resumed += 1;
    counters_.resumed_hit_tokens += num_external;
  }
  request.admissions.push_back(admission);
  record_admission(request, admission.local, num_external);
  request.skip_external_until_admitted = false;
  if (const auto& open = request.open_lookup)
    note_givers(request, open->chunks, open->num_local, open->num_local + open->num_external, open->num_purges);
  end_attempt(request);
  if (is_async) request.async_load = RequestState::AsyncLoad::kInProgress;
  request.running = !is_async;
  request.computed = admission.local + num_external;
  if (is_async && config_.on_device) request.loaded_end = request.computed;
  request.window_end = request.step_end = request.computed;
  request.checkpoint = 0;
  request.saved = 0;  // chunks that the pool already has are skipped when the saves are planned
}

LoadJob SchedulerCore::plan_load(const RequestState& request, std::uint32_t num_external,
                                 const BlockTable& blocks) const {
  const std::string& id = request.id.value;
  KVFERRY_CHECK(request.open_lookup && num_external <= request.open_lookup->num_external &&
                    (!has_windows_ || num_external == request.open_lookup->num_external),
                "exact-load: request {} was allocated {} external tokens, but its lookup found {}", id, num_external,
                request.open_lookup ? request.open_lookup->num_external : 0);
  KVFERRY_CHECK(blocks.size() == config_.groups.size(),
                "exact-load: request {} has blocks in {} KV groups, but the engine has {} groups", id, blocks.size(),
                config_.groups.size());
  const std::uint32_t local = request.open_lookup->num_local;
  const std::uint32_t end = local + num_external;
  const std::uint32_t job_start = local - local % block_tokens_;
  LoadJob job;
  job.request_id = id;
  job.attempt = request.attempt.value;
  job.is_async = is_load_async(request);
  std::vector<std::uint32_t> needed_in_job;
  for (std::size_t group = 0; group < blocks.size(); ++group) {
    job.block_ids.push_back(blocks_of(blocks, group, job_start, end, end));
    needed_in_job.push_back(std::max(local, window_start(group, end)) - job_start);
  }
  std::uint32_t chunk_start = 0;
  for (const ChunkRef chunk : request.open_lookup->chunks) {
    const ChunkPool::Slot& slot = pool_.slot(chunk.slot);
    const bool reaches_back = has_windows(slot.meta, chunk_start, local, end);
    if (!request.prepares)  // a preparation's chunks are verified later: in end_preparation()
      promise::verified_only(slot.ref == chunk && slot.state != ChunkPool::State::kWriting && reaches_back,
                             slot.checksums.size(), config_.num_ranks, chunk.slot);
    const std::uint32_t chunk_end = chunk_start + slot.meta.num_tokens;
    const std::uint32_t from = std::max(local, chunk_start), to = std::min(end, chunk_end);
    if (from < to) {
      job.items.push_back(
          {chunk, slot.checksums, slot.meta.num_tokens, from - chunk_start, from - job_start, to - from});
    }
    chunk_start = chunk_end;
  }
  promise::exact_load(job, local - job_start, num_external, config_.groups, needed_in_job, unit());
  return job;
}

}  // namespace kvferry
