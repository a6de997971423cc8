// A step's plan: what is packed and unpacked when, and what the workers say of it.
#include <algorithm>
#include <utility>

#include "connector/core/promises.h"
#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry {

StepPlan SchedulerCore::build_step(const StepInput& input, TimeNs now, const TokenSource& tokens) {
  tick(now);
  for (const RequestId& id : input.preempted) {
    RequestState* request = find(id);
    // Who was preempted and admitted again in one step left its old blocks at the look-up; the new ones stay.
    if (request != nullptr && request->running && request->admitted_in <= step_) release_blocks(*request);
  }
  // Whoever was answered and not allocated was refused on some exit path of the scheduler: which one doesn't matter.
  const std::vector<RequestId> refused(open_lookups_.begin(), open_lookups_.end());
  // vLLM gives an asynchronous load no block that any other waiting load may still need, a failed one included, and a
  // request that failed stays at the head of its queue. With nothing under way neither would ever end by itself.
  const bool is_stuck =
      loads_async() && input.scheduled.empty() && loads_.empty() && !refused.empty() &&
      std::none_of(requests_.begin(), requests_.end(), [](const auto& r) { return r.second.running; });
  if (is_stuck) {
    for (const RequestId& id : refused) {
      requests_.at(id).skip_external_until_admitted = true;
      requests_.at(id).yield_in_step = step_ + 2;  // the step after the one that is planned now
    }
  }
  for (const RequestId& id : refused) end_attempt(requests_.at(id));
  promise::no_stale_lookup(open_lookups_.size(), step_ + 1);

  StepPlan plan;
  plan.step = ++step_;
  plan.loads = std::exchange(loads_next_, {});
  last_order_.resize(input.scheduled.size());
  for (std::size_t place = 0; place < input.scheduled.size(); ++place) {
    const ScheduledRequest& scheduled = input.scheduled[place];
    RequestState* request = find_scheduled(scheduled, place);
    if (request == nullptr) continue;
    request->running = true;
    if (scheduled.block_ids) request->blocks = *scheduled.block_ids;
    for (std::size_t group = 0; group < std::min(scheduled.new_block_ids.size(), request->blocks.size()); ++group) {
      const std::vector<BlockId>& added = scheduled.new_block_ids[group];
      request->blocks[group].insert(request->blocks[group].end(), added.begin(), added.end());
    }
    request->computed = scheduled.num_computed + scheduled.num_scheduled;
    request->window_end = scheduled.num_computed;  // a later step's blocks are overwritten in that step, not before
    const bool fills_a_chunk = request->computed >= request->saved + config_.chunk_tokens;
    if (!request->cacheable || (!fills_a_chunk && !request->handoff)) continue;
    if (tokens && lacks_tokens(*request)) {
      const std::uint32_t known = request->chain.size();
      update_tokens(request->id, known, tokens(request->id, known));
    }
    plan_running_saves(*request, plan);
  }
  plan.saves_before = std::exchange(saves_before_next_, {});
  announce_evictions();
  return plan;
}

/// Running requests are told in the order of the step before, but for those that came and went.
RequestState* SchedulerCore::find_scheduled(const ScheduledRequest& scheduled, std::size_t place) {
  constexpr std::size_t kAhead = 8;  // what step after step looks at is in no cache by then
  if (place + kAhead < last_order_.size()) {
    __builtin_prefetch(last_order_[place + kAhead]);
    __builtin_prefetch(reinterpret_cast<const char*>(last_order_[place + kAhead]) + 64);
  }
  RequestState*& last = last_order_[place];
  if (last == nullptr || (!scheduled.same_place && last->id != scheduled.id)) last = find(scheduled.id);
  return last;
}

/// Whether a chunk is computed to its end whose last tokens nobody has told yet.
bool SchedulerCore::lacks_tokens(const RequestState& request) const {
  const std::uint32_t next_end = request.saved + config_.chunk_tokens;
  return request.computed >= next_end && request.chain.size() < request.computed &&
         (config_.save_decode_cache || next_end <= request.num_prompt_tokens);
}

/// Plans the full chunks that are computed and not tried yet; returns the token up to which the request may be saved.
std::uint32_t SchedulerCore::plan_full_chunks(RequestState& request, std::vector<SaveJob>& jobs) {
  const std::uint32_t chunk_tokens = config_.chunk_tokens;
  std::uint32_t savable = std::min(request.computed, request.chain.size());
  if (!config_.save_decode_cache) savable = std::min(savable, request.num_prompt_tokens);
  for (; request.saved + chunk_tokens <= savable; request.saved += chunk_tokens) {
    if (const auto item = plan_chunk(request, request.saved / chunk_tokens, chunk_tokens))
      append_save(request, *item, jobs);
  }
  return savable;
}

/// Full chunks as they fill, and the prompt's tail where a decode worker will come for it.
void SchedulerCore::plan_running_saves(RequestState& request, StepPlan& plan) {
  const std::uint32_t chunk_tokens = config_.chunk_tokens;
  const std::uint32_t savable = plan_full_chunks(request, plan.saves_after);
  if (request.handoff && savable >= request.num_prompt_tokens && request.last_tail_end < request.num_prompt_tokens) {
    const std::uint32_t full = request.num_prompt_tokens / chunk_tokens;
    const std::uint32_t rest = request.num_prompt_tokens % chunk_tokens;
    if (rest == 0) return;
    if (const auto item = plan_chunk(request, full, rest)) append_save(request, *item, plan.saves_after);
  }
}

/// The blocks are about to go: packs what is computed and not in the pool, at the start of the next step.
void SchedulerCore::plan_leftover_saves(RequestState& request, bool tail) {
  if (!request.cacheable) return;
  const std::uint32_t savable = plan_full_chunks(request, saves_before_next_);
  if (tail && savable > request.saved) {
    if (const auto item = plan_chunk(request, request.saved / config_.chunk_tokens, savable - request.saved))
      append_save(request, *item, saves_before_next_);
  }
}

/// The blocks [first_block, end_block) of a group; kNoBlock for those that fell out of its window when the token after
/// `window_end` tokens was next. The engine has its null block there, or, in a table of an earlier step, a block that
/// may be somebody else's by now.
std::vector<BlockId> SchedulerCore::blocks_of(const BlockTable& table, std::size_t group, std::uint32_t first_block,
                                              std::uint32_t end_block, std::uint32_t window_end) const {
  const std::vector<BlockId>& all = table[group];
  const auto end = std::min<std::size_t>(end_block, all.size());
  const auto begin = std::min<std::size_t>(first_block, end);
  std::vector<BlockId> blocks(all.begin() + static_cast<std::ptrdiff_t>(begin),
                              all.begin() + static_cast<std::ptrdiff_t>(end));
  if (config_.windows[group] == 0) return blocks;
  const std::uint32_t first_held = window_start(window_end) / config_.block_tokens;
  for (std::size_t i = 0; i < blocks.size(); ++i)
    if (begin + i < first_held || blocks[i] == kNullBlock) blocks[i] = kNoBlock;
  return blocks;
}

/// False where the engine has given up a block that it should still have.
bool SchedulerCore::has_blocks(const RequestState& request, std::uint32_t first_token, std::uint32_t end) const {
  if (request.blocks.size() != config_.windows.size()) return false;
  const std::uint32_t end_block = (end + config_.block_tokens - 1) / config_.block_tokens;
  for (std::size_t group = 0; group < request.blocks.size(); ++group) {
    const std::uint32_t held_from = config_.windows[group] == 0 ? 0 : window_start(request.window_end);
    const std::uint32_t first_block = std::max(first_token, held_from) / config_.block_tokens;
    const std::vector<BlockId>& blocks = request.blocks[group];
    for (std::size_t i = first_block; i < std::min<std::size_t>(end_block, blocks.size()); ++i)
      if (blocks[i] == kNullBlock) return false;
  }
  return true;
}

/// A slot for chunk `chunk` of the request, num_tokens long; nullopt when the pool has it or has no room, or the engine
/// has no longer all of it.
std::optional<SaveItem> SchedulerCore::plan_chunk(RequestState& request, std::uint32_t chunk,
                                                  std::uint32_t num_tokens) {
  TokenChain& chain = request.chain;
  const bool is_tail = num_tokens < config_.chunk_tokens;
  ChunkMeta meta;
  meta.key = is_tail ? chain.tail_key(chunk, num_tokens) : chain.key(chunk);
  meta.num_tokens = num_tokens;
  meta.is_tail = is_tail;
  if (is_tail && num_tokens >= kTailGroupTokens) meta.tail_group = chain.tail_group(chunk);
  const std::uint32_t end = chunk * config_.chunk_tokens + num_tokens;
  const auto remember_tail = [&](ChunkRef tail) {
    if (request.last_tail && *request.last_tail != tail) pool_.demote(*request.last_tail);
    request.last_tail = is_tail ? std::optional(tail) : std::nullopt;
    request.last_tail_end = is_tail ? end : 0;
  };
  if (const ChunkPool::Slot* held = pool_.find(meta.key)) {
    if (is_tail) remember_tail(held->ref);
    return std::nullopt;
  }
  const std::uint32_t start = chunk * config_.chunk_tokens;
  if (!has_blocks(request, start, end)) return std::nullopt;
  meta.window_from = std::clamp(window_start(request.window_end), start, end) - start;
  const std::optional<ChunkRef> slot = pool_.reserve(meta, "save of " + request.id.value);
  if (!slot) {
    counters_.pool_full += 1;
    return std::nullopt;
  }
  saving_.insert(*slot);
  const PushSender::Tag tag = sender_.saving(meta.key, *slot, now_).value_or(PushSender::Tag{});
  if (is_tail || (request.last_tail && end > request.last_tail_end)) remember_tail(*slot);
  return SaveItem{*slot, chunk * config_.chunk_tokens, num_tokens, tag.push, tag.index};
}

/// Adds the item to the request's job, rebased on the blocks that it touches.
void SchedulerCore::append_save(const RequestState& request, const SaveItem& item, std::vector<SaveJob>& jobs) {
  const std::uint32_t block_tokens = config_.block_tokens;
  const std::uint32_t first_block = item.first_token / block_tokens;
  const std::uint32_t end_block = (item.first_token + item.num_tokens + block_tokens - 1) / block_tokens;
  SaveJob job;
  job.request_id = request.id.value;
  for (std::size_t group = 0; group < request.blocks.size(); ++group)
    job.block_ids.push_back(blocks_of(request.blocks, group, first_block, end_block, request.window_end));
  job.items.push_back(item);
  job.items.back().first_token -= first_block * block_tokens;
  promise::saved_is_computed(job, first_block, request.computed, request.chain.size(), block_tokens);
  jobs.push_back(std::move(job));
}

/// Preempted: the blocks vanish with the next step, the pool's chunks don't.
void SchedulerCore::release_blocks(RequestState& request) {
  // The last plan counted every speculative token as accepted. What was said since tells at least that all tokens but
  // the last have their KV; the last one's place may hold a rejected token's.
  request.computed = std::min(request.computed, request.chain.size() - 1);
  plan_leftover_saves(request, config_.save_partial_chunks);
  request.running = false;
  request.blocks.clear();
  request.computed = 0;
  request.saved = 0;
  request.preemptions += 1;
  end_attempt(request);
}

void SchedulerCore::load_ended(RequestState& request, const Load& load) {
  constexpr std::uint32_t kMaxFailedLoads = 3;
  const bool is_complete = load.admission.loaded == load.admission.to_load;
  if (request.async_load == RequestState::AsyncLoad::kUnderWay && request.attempt.value == load.admission.attempt)
    request.async_load = is_complete ? RequestState::AsyncLoad::kDone : RequestState::AsyncLoad::kNone;
  // A damaged chunk is gone, so the next look-up finds another one or less. What failed without one, or again and
  // again, would fail for ever.
  if (!is_complete && (!load.found_corrupt || ++request.failed_loads >= kMaxFailedLoads)) request.cacheable = false;
}

/// A load failed, or the cache is reset. What was computed since, by that request or by others on its blocks, may rest
/// on KV that never came, and plans that save it are out already. vLLM goes back and computes it again: nothing planned
/// so far is pin.
void SchedulerCore::invalidate_planned_saves() {
  counters_.save_failures += saving_.size();
  for (const ChunkRef chunk : saving_) pool_.fail_write(chunk);
  for (auto& [id, request] : requests_) {
    request.computed = 0;  // until vLLM schedules it again and says from where
    request.saved = 0;
  }
}

void SchedulerCore::worker_report(const WorkerReport& report, TimeNs now) {
  now_ = now;
  for (const LoadDone& done : report.loads) {
    const auto found = loads_.find({done.request_id, done.attempt});
    promise::exactly_once(
        found != loads_.end() && report.rank < config_.num_ranks && found->second.ranks_done.insert(report.rank).second,
        fmt::format("the load of request {}", done.request_id));
    Load& load = found->second;
    Admission& admission = load.admission;
    admission.loaded = std::min(admission.loaded, done.tokens_loaded);
    load.found_corrupt |= !done.corrupt.empty();
    // What the engine waits for is nobody's yet; what is loaded in its step may be computed on already.
    if (!loads_async() && (done.tokens_loaded < admission.to_load || load.found_corrupt)) invalidate_planned_saves();
    for (const ChunkRef chunk : done.corrupt) {
      counters_.load_failures += 1;
      pool_.invalidate(chunk);  // what failed once is never offered again
    }
    if (load.ranks_done.size() < config_.num_ranks) continue;
    counters_.loaded_tokens += admission.loaded;
    pool_.unpin(load.pin);
    // The request may be gone by now: vLLM finishes requests before it hands over the report of their step.
    if (RequestState* request = find(RequestId{done.request_id})) {
      for (Admission& own : request->admissions)
        if (own.attempt == done.attempt) own.loaded = admission.loaded;
      load_ended(*request, load);
    }
    actions_.push_back(
        LogLine{fmt::format("request {} attempt {}{}: {} tokens, hit {}, local {}, to load {}, loaded {}",
                            done.request_id, done.attempt, admission.resumed ? " (resumed)" : "", admission.tokens,
                            admission.hit, admission.local, admission.to_load, admission.loaded),
                admission.loaded < admission.to_load});
    loads_.erase(found);
  }
  for (const SaveDone& save : report.saves) {
    const std::uint32_t tokens = pool_.slot(save.chunk.slot).meta.num_tokens;
    if (pool_.rank_written(save.chunk, report.rank, save.ok, save.checksum)) {
      counters_.saved_chunks += 1;
      counters_.saved_tokens += tokens;
      publish(save.chunk);
    } else if (!save.ok) {
      counters_.save_failures += 1;
    }
    const ChunkPool::State state = pool_.slot(save.chunk.slot).state;
    if (state == ChunkPool::State::kWriting) continue;
    saving_.erase(save.chunk);
    if (state != ChunkPool::State::kReady) sender_.chunk_write_failed(save.chunk, now);
  }
  announce_evictions();
  tick(now);
}

}  // namespace kvferry
