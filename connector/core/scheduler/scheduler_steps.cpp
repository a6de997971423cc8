// Plans a step, and handles the workers' reports on it.
#include <algorithm>
#include <utility>

#include "connector/core/promises.h"
#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry {

StepPlan SchedulerCore::build_step(const StepInput& input, TimeNs now, const TokenSource& tokens) {
  tick(now);
  for (const RequestId& id : input.preempted) {
    RequestState* request = find(id);
    // A request that was preempted and admitted again in one step has released its old blocks already.
    if (request != nullptr && request->running && request->admitted_in <= step_) release_blocks(*request);
  }
  // The lookups of these requests were answered, but vLLM has not admitted the requests.
  const std::vector<RequestId> refused(open_lookups_.begin(), open_lookups_.end());
  // vLLM reserves blocks for each waiting asynchronous load, failed loads included, and keeps a request whose load has
  // failed at the head of its queue. If nothing runs and nothing loads, no block would ever become free: the waiting
  // requests must then skip their loads.
  const bool is_stuck =
      loads_async() && input.scheduled.empty() && input.running.empty() && loads_.empty() && !refused.empty() &&
      std::none_of(requests_.begin(), requests_.end(), [](const auto& r) { return r.second.running; });
  if (is_stuck) {
    for (const RequestId& id : refused) {
      requests_.at(id).skip_external_until_admitted = true;
      requests_.at(id).yield_in_step = step_ + 2;  // the step after the one being planned
    }
  }
  bool lacks_blocks = !input.preempted.empty();
  for (const RequestId& id : refused) {
    RequestState& request = requests_.at(id);
    lacks_blocks |= !request.prepares;
    if (request.prepares) request.cacheable = false;  // a preparation gives way to requests that wait for blocks
  }
  for (const RequestId& id : refused) end_attempt(requests_.at(id));
  promise::no_stale_spec(open_lookups_.size(), step_ + 1);

  StepPlan plan;
  plan.step = ++step_;
  plan.loads = std::exchange(loads_next_, {});
  advance_preparations(lacks_blocks, now, plan);
  for (const BlockChange& change : input.block_changes)
    if (Progress* progress = ProgressTable::find(change.handle)) change_blocks(*progress->request, change);
  for (const RunningRequest& running : input.running) {
    if (Progress* progress = ProgressTable::find(running.handle))
      advance(*progress, running.num_computed, running.num_scheduled, tokens, plan);
  }
  for (const ScheduledRequest& scheduled : input.scheduled) {
    RequestState* request = find(scheduled.id);
    if (request == nullptr) continue;
    if (scheduled.block_ids) request->blocks = *scheduled.block_ids;
    advance(request->progress, scheduled.num_computed, scheduled.num_scheduled, tokens, plan);
  }
  plan.saves_before = std::exchange(saves_before_next_, {});
  announce_evictions();
  return plan;
}

void SchedulerCore::change_blocks(RequestState& request, const BlockChange& change) {
  if (change.is_whole) request.blocks.assign(change.blocks.size(), {});
  for (std::size_t group = 0; group < std::min(change.blocks.size(), request.blocks.size()); ++group) {
    const std::vector<BlockId>& added = change.blocks[group];
    request.blocks[group].insert(request.blocks[group].end(), added.begin(), added.end());
  }
}

/// Plans what the step saves of one scheduled request. For a request that fills no chunk, which is the usual case, the
/// function rarely uses more than `progress`.
void SchedulerCore::advance(Progress& progress, std::uint32_t num_computed, std::uint32_t num_scheduled,
                            const TokenSource& tokens, StepPlan& plan) {
  progress.running = true;
  if (progress.computes_until != 0 && num_computed >= progress.computes_until) {
    progress.computes_until = 0;
    record(*progress.request, LifeKind::kComputed);
  }
  progress.computed = progress.step_end = num_computed + num_scheduled;
  progress.window_end = num_computed;  // blocks that a later step drops keep their KV until that step
  if (config_.checkpoint_alignment > 0) progress.request->checkpoint = checkpoint_of(*progress.request);
  const bool fills_a_chunk = progress.computed >= progress.saved + config_.chunk_tokens;
  if (!progress.cacheable || config_.only_reads || (!fills_a_chunk && !progress.handoff)) return;
  RequestState& request = *progress.request;
  if (tokens && lacks_tokens(request)) {
    const std::uint32_t known = request.chain.size();
    update_tokens(request.id, known, tokens(request.id, known));
  }
  plan_running_saves(request, plan);
}

/// Returns the number of tokens before the step's checkpoint, 0 if the step has none. A checkpoint is the model's state
/// that the engine keeps at the last block boundary before the step's end; CoreConfig::checkpoint_alignment says when
/// the engine does so.
std::uint32_t SchedulerCore::checkpoint_of(const RequestState& request) const {
  const std::uint32_t alignment = config_.checkpoint_alignment, start = request.window_end;
  if (alignment == 0 || request.step_end == 0 || start != reusable(start)) return 0;
  const std::uint32_t end = reusable(request.step_end - 1);
  if (end <= start || (end - start) % alignment != 0) return 0;
  for (std::size_t group = 0; group < config_.groups.size(); ++group) {
    if (config_.groups[group].window == 0) continue;
    const std::uint32_t block = end / config_.groups[group].block_tokens - 1;
    const std::vector<BlockId>& blocks = request.blocks.at(group);
    if (block >= blocks.size() || blocks[block] == kNullBlock) return 0;  // the engine had no block for the state
  }
  return end;
}

/// Handles a preemption: plans the request's last saves, since its blocks may be overwritten in the next step.
void SchedulerCore::release_blocks(RequestState& request) {
  // The last plan counted every speculative token as accepted. All tokens known now except the last one have their KV;
  // the last one's place may contain KV of a rejected token.
  request.computed = std::min(request.computed, request.chain.size() - 1);
  request.was_loaded_in_vain = request.loaded_end > 0 && request.computed <= request.loaded_end;
  if (!request.was_loaded_in_vain) request.loaded_end = 0;
  plan_leftover_saves(request, config_.save_partial_chunks);
  record_preemption(request);
  request.running = false;
  request.blocks.clear();
  request.computed = 0;
  request.saved = 0;
  request.preemptions += 1;
  end_attempt(request);
}

void SchedulerCore::load_ended(RequestState& request, const PendingLoad& load) {
  constexpr std::uint32_t kMaxFailedLoads = 3;
  const bool is_complete = load.admission.loaded == load.admission.to_load;
  if (request.prepares) request.cacheable = false;  // a preparation saves nothing, and is not loaded again
  if (request.async_load == RequestState::AsyncLoad::kInProgress && request.attempt.value == load.admission.attempt)
    request.async_load = is_complete ? RequestState::AsyncLoad::kDone : RequestState::AsyncLoad::kNone;
  // A damaged chunk was invalidated, so the next lookup differs. A load that failed for another reason, or repeatedly,
  // would probably fail again: the request is no longer loaded or saved.
  if (!is_complete && (!load.found_corrupt || ++request.failed_loads >= kMaxFailedLoads)) request.cacheable = false;
}

/// Fails every planned save, because a load failed or the cache is reset. KV computed since the load, by the load's
/// request or by others that share its blocks, may depend on KV that was never loaded. vLLM computes that KV again.
void SchedulerCore::invalidate_planned_saves() {
  counters_.save_failures += saving_.size();
  for (const ChunkRef chunk : saving_) pool_.fail_write(chunk);
  for (auto& [id, request] : requests_) {
    request.computed = 0;  // the count stays 0 until vLLM schedules the request again
    request.saved = 0;
  }
}

void SchedulerCore::worker_report(const WorkerReport& report, TimeNs now) {
  now_ = now;
  counters_.accesses_refused += report.accesses_refused;
  for (const LoadDone& done : report.loads) {
    const auto found = loads_.find({done.request_id, done.attempt});
    promise::exactly_once(
        found != loads_.end() && report.rank < config_.num_ranks && found->second.ranks_done.insert(report.rank).second,
        "the report on the load of request {}", done.request_id);
    PendingLoad& load = found->second;
    Admission& admission = load.admission;
    admission.loaded = std::min(admission.loaded, done.tokens_loaded);
    load.found_corrupt |= !done.corrupt.empty();
    // With a synchronous load the engine may already have used the missing KV in its computation.
    if (!loads_async() && !load.is_prepared && (done.tokens_loaded < admission.to_load || load.found_corrupt))
      invalidate_planned_saves();
    for (const ChunkRef chunk : done.corrupt) {
      counters_.load_failures += 1;
      pool_.invalidate(chunk);  // a damaged chunk is never offered again
    }
    if (load.ranks_done.size() < config_.num_ranks) continue;
    counters_.loaded_tokens += admission.loaded;
    if (load.is_prepared) {
      const bool is_whole = admission.loaded == admission.to_load;
      promise::verified_only_when_prepared(load.is_verified || !is_whole, done.request_id);
      counters_.prepared += is_whole ? 1 : 0;
      std::erase_if(preparations_, [&](const Preparation& ended) {
        return ended.job.request_id == done.request_id && ended.job.attempt == done.attempt;
      });
    }
    pool_.unpin(load.pin);
    // The request may be unknown by now: vLLM may finish it before it passes the workers' reports on.
    RequestState* const request = find(RequestId{done.request_id});
    record_load(request, load);
    if (request != nullptr) {
      for (Admission& own : request->admissions)
        if (own.attempt == done.attempt) own.loaded = admission.loaded;
      load_ended(*request, load);
    }
    actions_.push_back(LogLine{
        fmt::format("request {}, attempt {}{}: of {} tokens {} were found in a cache, {} of these in the engine's; "
                    "of {} tokens to load {} were loaded",
                    done.request_id, done.attempt, admission.resumed ? " (resumed)" : "", admission.tokens,
                    admission.hit, admission.local, admission.to_load, admission.loaded),
        admission.loaded < admission.to_load});
    loads_.erase(found);
  }
  for (const SaveDone& save : report.saves) {
    const ChunkPool::Slot& slot = pool_.slot(save.chunk.slot);
    if (slot.is_in_frame(report.rank)) {
      slot_written(save.chunk, report.rank, save.ok, now);
    } else if (pool_.rank_written(save.chunk, report.rank, save.ok, save.checksum, save.is_in_frame)) {
      counters_.saved_chunks += 1;
      counters_.saved_tokens += slot.meta.num_tokens;
      publish(save.chunk);
    } else if (!save.ok) {
      counters_.save_failures += 1;
    }
    if (slot.state == ChunkPool::State::kWriting) continue;
    saving_.erase(save.chunk);
    if (slot.state != ChunkPool::State::kReady) sender_.chunk_write_failed(save.chunk);
  }
  announce_evictions();
  tick(now);
}

}  // namespace kvferry
