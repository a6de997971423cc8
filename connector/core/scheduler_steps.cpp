// A step's plan: what is packed and unpacked when, and what the workers say of it.
#include <algorithm>
#include <utility>

#include "connector/core/promises.h"
#include "connector/core/scheduler_core.h"

namespace kvferry {

StepPlan SchedulerCore::build_step(const StepInput& input, TimeNs now) {
  tick(now);
  for (const RequestId& id : input.preempted) {
    RequestState* request = find(id);
    // Who was preempted and admitted again in one step left its old blocks at the look-up; the new ones stay.
    if (request != nullptr && request->running && request->admitted_in <= step_) leave_blocks(*request);
  }
  // Whoever was answered and not allocated was refused on some exit path of the scheduler: which one doesn't matter.
  const std::vector<RequestId> refused(open_lookups_.begin(), open_lookups_.end());
  for (const RequestId& id : refused) end_attempt(requests_.at(id));
  promise::no_stale_spec(open_lookups_.size(), step_ + 1);

  StepPlan plan;
  plan.step = ++step_;
  plan.loads = std::exchange(loads_next_, {});
  for (const ScheduledRequest& scheduled : input.scheduled) {
    RequestState* request = find(scheduled.id);
    if (request == nullptr) continue;
    request->running = true;
    if (scheduled.block_ids) request->blocks = *scheduled.block_ids;
    request->computed = scheduled.num_computed + scheduled.num_scheduled;
    if (request->cacheable) plan_running_saves(*request, plan);
  }
  plan.saves_before = std::exchange(saves_before_next_, {});
  announce_evictions();
  return plan;
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

/// False where the engine has given up a block of these tokens, as it does with those outside a sliding window: it puts
/// the null block in its place.
bool SchedulerCore::has_blocks(const RequestState& request, std::uint32_t first_token, std::uint32_t end) const {
  const std::uint32_t first_block = first_token / config_.block_tokens;
  const std::uint32_t end_block = (end + config_.block_tokens - 1) / config_.block_tokens;
  return std::none_of(request.blocks.begin(), request.blocks.end(), [&](const std::vector<BlockId>& group) {
    const auto last = group.begin() + std::min<std::ptrdiff_t>(end_block, std::ssize(group));
    return std::find(group.begin() + std::min<std::ptrdiff_t>(first_block, std::ssize(group)), last, kNullBlock) !=
           last;
  });
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
  if (!has_blocks(request, chunk * config_.chunk_tokens, end)) return std::nullopt;
  const std::optional<ChunkRef> slot = pool_.reserve(meta, "save of " + request.id.value);
  if (!slot) {
    counters_.pool_full += 1;
    return std::nullopt;
  }
  saving_.insert(*slot);
  if (is_tail || (request.last_tail && end > request.last_tail_end)) remember_tail(*slot);
  return SaveItem{*slot, chunk * config_.chunk_tokens, num_tokens};
}

/// Adds the item to the request's job, rebased on the blocks that it touches.
void SchedulerCore::append_save(const RequestState& request, const SaveItem& item, std::vector<SaveJob>& jobs) {
  const std::uint32_t block_tokens = config_.block_tokens;
  const std::uint32_t first_block = item.first_token / block_tokens;
  const std::uint32_t end_block = (item.first_token + item.num_tokens + block_tokens - 1) / block_tokens;
  SaveJob job;
  job.request_id = request.id.value;
  for (const std::vector<BlockId>& group : request.blocks) {
    const auto last = std::min<std::size_t>(end_block, group.size());
    job.block_ids.emplace_back(group.begin() + std::min<std::size_t>(first_block, last), group.begin() + last);
  }
  job.items.push_back(item);
  job.items.back().first_token -= first_block * block_tokens;
  promise::saved_is_computed(job, first_block, request.computed, request.chain.size(), block_tokens);
  jobs.push_back(std::move(job));
}

/// Preempted: the blocks vanish with the next step, the pool's chunks don't.
void SchedulerCore::leave_blocks(RequestState& request) {
  // The last plan counted every speculative token as accepted. What was said since tells at least that all tokens but
  // the last have their KV; the last one's place may hold a rejected token's.
  request.computed = std::min(request.computed, request.chain.size() - 1);
  plan_leftover_saves(request, config_.save_unfull_chunk);
  request.running = false;
  request.blocks.clear();
  request.computed = 0;
  request.saved = 0;
  request.preemptions += 1;
  end_attempt(request);
}

/// A load failed, or the cache is reset. What was computed since, by that request or by others on its blocks, may rest
/// on KV that never came, and plans that save it are out already. vLLM goes back and computes it again: nothing planned
/// so far is kept.
void SchedulerCore::distrust_planned_saves() {
  counters_.save_failures += saving_.size();
  for (const ChunkRef chunk : saving_) pool_.spoil(chunk);
  for (auto& [id, request] : requests_) {
    request.computed = 0;  // until vLLM schedules it again and says from where
    request.saved = 0;
  }
}

void SchedulerCore::worker_report(const WorkerReport& report, TimeNs now) {
  for (const LoadDone& done : report.loads) {
    const auto found = loads_.find({done.request_id, done.attempt});
    promise::exactly_once(
        found != loads_.end() && report.rank < config_.num_ranks && found->second.ranks_done.insert(report.rank).second,
        fmt::format("the load of request {}", done.request_id));
    Load& load = found->second;
    Admission& admission = load.admission;
    admission.loaded = std::min(admission.loaded, done.tokens_loaded);
    if (done.tokens_loaded < admission.to_load || !done.corrupt.empty()) distrust_planned_saves();
    for (const ChunkRef chunk : done.corrupt) {
      counters_.load_failures += 1;
      pool_.condemn(chunk);  // what failed once is never offered again
    }
    if (load.ranks_done.size() < config_.num_ranks) continue;
    counters_.loaded_tokens += admission.loaded;
    pool_.unpin(load.pin);
    // The request may be gone by now: vLLM finishes requests before it hands over the report of their step.
    if (RequestState* request = find(RequestId{done.request_id})) {
      for (Admission& own : request->admissions)
        if (own.attempt == done.attempt) own.loaded = admission.loaded;
    }
    actions_.push_back(
        LogLine{fmt::format("request {} attempt {}{}: {} tokens, hit {}, local {}, to load {}, loaded {}",
                            done.request_id, done.attempt, admission.resumed ? " (resumed)" : "", load.total_tokens,
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
    if (pool_.slot(save.chunk.slot).state != ChunkPool::State::kWriting) saving_.erase(save.chunk);
  }
  announce_evictions();
  tick(now);
}

}  // namespace kvferry
