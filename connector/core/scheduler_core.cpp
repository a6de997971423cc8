// The life of a request: added, looked up, allocated, finished.
#include "connector/core/scheduler_core.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "connector/core/promises.h"

namespace kvferry {

SchedulerCore::SchedulerCore(CoreConfig config)
    : config_(std::move(config)), pool_(config_.num_slots, config_.num_ranks), next_lease_(config_.first_lease) {
  KVFERRY_CHECK(next_lease_ > 0, "lease 0 means none");
}

RequestState* SchedulerCore::find(const RequestId& id) {
  const auto found = requests_.find(id);
  return found == requests_.end() ? nullptr : &found->second;
}

void SchedulerCore::add_request(const NewRequest& request, TimeNs now) {
  if (requests_.contains(request.id) || request.tokens.empty()) return;
  const ChunkKey root = root_key(config_.fingerprint, request.extras);
  RequestState& state =
      requests_.try_emplace(request.id, NewRequest(request), root, config_.chunk_tokens).first->second;
  // An id may come again while a load of its former self is under way: attempts tell the two apart.
  const auto after = loads_.upper_bound({request.id.value, std::numeric_limits<std::uint32_t>::max()});
  if (after != loads_.begin() && std::prev(after)->first.first == request.id.value)
    state.attempt.value = std::prev(after)->first.second;
  if (state.cacheable && cover(state).tokens + 1 < state.chain.size()) start_fetch(state, now);
}

void SchedulerCore::update_tokens(const RequestId& id, std::uint32_t keep, std::span<const std::int32_t> new_tokens) {
  if (RequestState* request = find(id)) {
    if (keep < request->chain.size()) {  // KV computed from tokens that were taken back is nobody's
      request->computed = std::min(request->computed, keep);
      request->saved = std::min(request->saved, keep - keep % config_.chunk_tokens);
    }
    request->chain.truncate(keep);
    request->chain.append(new_tokens);
  }
}

std::uint32_t SchedulerCore::num_tokens(const RequestId& id) const {
  const auto found = requests_.find(id);
  return found == requests_.end() ? 0 : found->second.chain.size();
}

Coverage SchedulerCore::cover(RequestState& request) {
  Coverage coverage;
  TokenChain& chain = request.chain;
  std::uint32_t i = 0;
  for (; i < chain.num_full_chunks(); ++i) {
    const ChunkPool::Slot* slot = pool_.find(chain.key(i));
    if (slot == nullptr || slot->state != ChunkPool::State::kReady) {
      coverage.growing = slot != nullptr;
      break;
    }
    coverage.chunks.push_back(slot->ref);
  }
  coverage.tokens = i * chain.chunk_tokens();
  // A tail may follow: one of its group, or one too short for a group that is known by its exact length.
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
      consider(pool_.find(chain.tail_key(i, end - coverage.tokens)));
  };
  exact(request.last_tail_end);
  if (request.source) exact(request.source->num_tokens);
  if (best != nullptr) {
    coverage.chunks.push_back(best->ref);
    coverage.tokens += best->meta.num_tokens;
  }
  return coverage;
}

Answer SchedulerCore::lookup(const RequestId& id, std::uint32_t num_local, TimeNs now) {
  RequestState* found = find(id);
  if (found == nullptr || !found->cacheable) return {};
  RequestState& request = *found;
  if (request.running) leave_blocks(request);  // it was preempted, and build_step has yet to hear of it
  if (request.spec) {
    // Asked again in the same step: the stored answer, against what the engine has by itself now.
    LookupSpec& spec = *request.spec;
    const std::uint32_t external = spec.hit > num_local ? spec.hit - num_local : 0;
    std::uint32_t held = 0;
    for (const ChunkRef chunk : spec.chunks)
      held += pool_.slot(chunk.slot).ref == chunk ? pool_.slot(chunk.slot).meta.num_tokens : 0;
    if (!spec.chunks.empty()) promise::idempotent_lookup(spec.hit, std::min(held, request.chain.size() - 1), id.value);
    spec.num_local = num_local;
    spec.num_external = external;
    return {false, external};
  }
  counters_.lookups += 1;
  if (!request.attempt_open) {
    request.attempt_open = true;
    request.attempt.value += 1;
    request.wait_deadline = now + config_.load_timeout;
  }
  Coverage coverage = cover(request);
  const bool more_could_help = std::max(coverage.tokens, num_local) + 1 < request.chain.size();
  if (!request.fetch && !request.fetched && more_could_help && now >= request.next_fetch_at) start_fetch(request, now);
  if ((request.fetch || coverage.growing) && more_could_help) {
    if (now < request.wait_deadline) return {true, 0};
    counters_.fetch_timeouts += 1;
  }
  return answer(request, coverage, num_local, now);
}

Answer SchedulerCore::answer(RequestState& request, const Coverage& coverage, std::uint32_t num_local, TimeNs now) {
  // A synchronous load leaves one token to compute, so a full hit gives back its last token.
  const std::uint32_t hit = std::min(coverage.tokens, request.chain.size() - 1);
  LookupSpec spec;
  spec.hit = hit;
  spec.num_local = num_local;
  spec.num_external = hit > num_local ? hit - num_local : 0;
  promise::sane_counts(num_local, spec.num_external, request.chain.size(), request.id.value);
  if (hit > 0) {
    // Held even where the engine needs none of it: asked again in this step, it may have lost its own blocks.
    spec.chunks = coverage.chunks;
    spec.pin = pool_.pin(coverage.chunks, "look-up of " + request.id.value, now, now + config_.pin_ttl);
    pool_.touch(coverage.chunks);
  }
  if (spec.num_external > 0) counters_.lookup_hits += 1;
  const Answer answer{false, spec.num_external};
  request.spec = std::move(spec);
  open_lookups_.insert(request.id);
  return answer;
}

/// The one way out of an attempt that was not admitted, whatever stopped it: nothing of the look-up stays.
void SchedulerCore::end_attempt(RequestState& request) {
  if (request.spec) {
    pool_.unpin(request.spec->pin);
    request.spec.reset();
  }
  open_lookups_.erase(request.id);
  request.attempt_open = false;
  request.fetched = false;
}

void SchedulerCore::allocated(const RequestId& id, std::uint32_t num_external, const BlockTable& blocks, TimeNs now) {
  RequestState* found = find(id);
  if (found == nullptr) return;
  RequestState& request = *found;
  if (request.running) leave_blocks(request);  // preempted since, and never looked up: not cacheable
  Admission admission;
  admission.attempt = request.attempt.value;
  admission.resumed = request.preemptions > 0;
  std::uint32_t local = 0;
  if (request.spec) {
    local = request.spec->num_local;
    admission.hit = std::max(request.spec->hit, local);
    admission.local = local;
    admission.to_load = num_external;
  }
  if (num_external > 0) {
    KVFERRY_CHECK(request.spec && num_external <= request.spec->num_external,
                  "exact-load: request {} was allocated {} external tokens, the look-up offered {}", id, num_external,
                  request.spec ? request.spec->num_external : 0);
    const std::uint32_t end = local + num_external;
    const std::uint32_t first_block = local / config_.block_tokens;
    const std::uint32_t job_start = first_block * config_.block_tokens;
    LoadJob job;
    job.request_id = id.value;
    job.attempt = request.attempt.value;
    const std::uint32_t last_block = (end + config_.block_tokens - 1) / config_.block_tokens;
    for (const std::vector<BlockId>& group : blocks) {
      KVFERRY_CHECK(group.size() >= last_block, "exact-load: request {} has {} blocks for {} tokens", id, group.size(),
                    end);
      job.block_ids.emplace_back(group.begin() + first_block, group.begin() + last_block);
    }
    std::uint32_t chunk_start = 0;
    for (const ChunkRef chunk : request.spec->chunks) {
      const ChunkPool::Slot& slot = pool_.slot(chunk.slot);
      promise::verified_only(slot.ref == chunk && slot.state != ChunkPool::State::kWriting, slot.checksums.size(),
                             config_.num_ranks, chunk.slot);
      const std::uint32_t chunk_end = chunk_start + slot.meta.num_tokens;
      const std::uint32_t from = std::max(local, chunk_start), to = std::min(end, chunk_end);
      if (from < to) {
        job.items.push_back(
            {chunk, slot.checksums, slot.meta.num_tokens, from - chunk_start, from - job_start, to - from});
      }
      chunk_start = chunk_end;
    }
    promise::exact_load(job, local - job_start, num_external, config_.block_tokens);
    const PinId pin = pool_.pin(request.spec->chunks, "load for " + id.value, now, now + config_.pin_ttl);
    Load& load = loads_[{id.value, job.attempt}] = Load{pin, {}, admission, request.chain.size()};
    load.admission.loaded = num_external;
    loads_next_.push_back(std::move(job));
    counters_.loads += 1;
  }
  // Counted once per admission, here, where the engine has committed to it.
  counters_.hit_tokens += num_external;
  if (admission.resumed) {
    counters_.resumed += 1;
    counters_.resumed_hit_tokens += num_external;
  }
  request.admissions.push_back(admission);
  end_attempt(request);
  request.running = true;
  request.admitted_in = step_ + 1;
  request.blocks = blocks;
  request.computed = local + num_external;
  request.saved = 0;  // restarts: the next step skips what the pool holds
}

FinishedRequest SchedulerCore::finished(const RequestId& id, std::uint32_t num_computed, const BlockTable& blocks,
                                        bool aborted, TimeNs now) {
  FinishedRequest result;
  RequestState* found = find(id);
  if (found == nullptr) return result;
  RequestState& request = *found;
  result.known = true;
  result.preemptions = request.preemptions;
  result.fetch_ns = request.fetch_ns;
  if (request.running && !aborted) {
    request.blocks = blocks;
    request.computed = num_computed;
    plan_leftover_saves(request, config_.save_unfull_chunk);
    if (request.handoff) {
      result.handoff = true;
      result.handoff_tokens = std::min(num_computed, request.num_prompt_tokens);
      std::vector<ChunkRef> chunks;
      const std::uint32_t full = result.handoff_tokens / config_.chunk_tokens;
      const auto hold = [&](const ChunkPool::Slot* slot) {
        if (slot != nullptr) chunks.push_back(slot->ref);
      };
      for (std::uint32_t i = 0; i < full; ++i) hold(pool_.find(request.chain.key(i)));
      if (const std::uint32_t rest = result.handoff_tokens % config_.chunk_tokens; rest > 0)
        hold(pool_.find(request.chain.tail_key(full, rest)));
      if (const auto former = handoffs_.find(id.value); former != handoffs_.end()) pool_.unpin(former->second);
      handoffs_[id.value] = pool_.pin(std::move(chunks), "hand-off of " + id.value, now, now + config_.handoff_ttl);
    }
  }
  result.admissions = std::move(request.admissions);
  end_attempt(request);
  if (request.fetch) {
    fetches_.erase(request.fetch->id);  // a pull under way still fills the pool; a lease that comes is given back
    fetching_.erase(id);
  }
  requests_.erase(id);
  return result;
}

void SchedulerCore::reset_cache() {
  // Held chunks too: what a hold still reads is freed when it ends, and no look-up finds it any more.
  for (const ChunkPool::Slot* slot : pool_.ready()) pool_.condemn(slot->ref);
  distrust_planned_saves();
  announce_evictions();
}

std::vector<Action> SchedulerCore::take_actions() { return std::exchange(actions_, {}); }

std::vector<ChunkMeta> SchedulerCore::snapshot() const {
  std::vector<ChunkMeta> chunks;
  for (const ChunkPool::Slot* slot : pool_.ready()) chunks.push_back(slot->meta);
  return chunks;
}

void SchedulerCore::publish(ChunkRef chunk) {
  const ChunkPool::Slot& slot = pool_.slot(chunk.slot);
  promise::verified_only(slot.ref == chunk && slot.state == ChunkPool::State::kReady, slot.checksums.size(),
                         config_.num_ranks, chunk.slot);
  actions_.push_back(ChunksPublished{{slot.meta}});
}

void SchedulerCore::announce_evictions() {
  std::vector<ChunkKey> keys = pool_.take_evicted();
  counters_.evicted_chunks += keys.size();
  if (!keys.empty()) actions_.push_back(ChunksEvicted{std::move(keys)});
}

void SchedulerCore::tick(TimeNs now) {
  counters_.holds_expired += pool_.expire_pins(now).size();
  std::erase_if(handoffs_, [&](const auto& entry) { return !pool_.pinned(entry.second); });
  std::erase_if(leases_, [&](const auto& entry) { return !pool_.pinned(entry.second.pin); });
  std::erase_if(suspect_until_, [&](const auto& entry) { return entry.second <= now; });
  const std::vector<RequestId> waiting(fetching_.begin(), fetching_.end());
  for (const RequestId& id : waiting) {
    RequestState& request = requests_.at(id);
    if (request.fetch->try_deadline > now) continue;
    counters_.fetch_timeouts += 1;
    if (request.fetch->stage == Fetch::Stage::kLease) suspect_until_[request.fetch->endpoint] = now + 5 * kSecond;
    advance_fetch(request, now);
  }
  tick_orders(now);
}

}  // namespace kvferry
