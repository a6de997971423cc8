// The execution of a step, and what vLLM's Scheduler.update_from_output() does with its results.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "mini_engine.h"
#include "schedule_log.h"

namespace kvferry::sim {

/// Returns what the worker computes for a scheduled request. The scheduler counts all drafts as accepted until their
/// output is processed. The worker knows which were accepted, and starts at its last sampled token.
ForwardItem MiniEngine::forward_item(Request& request, const ScheduledRequest& scheduled, Scheduled& out) {
  ForwardItem item;
  item.request_id = request.spec.id;
  item.stamps = &request.text.stamps;
  item.table = request.table;
  item.first = std::min(scheduled.num_computed, request.sampled - 1);
  item.num = scheduled.num_scheduled;
  item.loaded_from = request.loaded_from;
  item.loaded_to = request.loaded_to;
  const std::uint32_t expected = request.known + request.placeholders;
  const bool samples = scheduled.num_computed + scheduled.num_scheduled >= expected;
  if (!samples) return item;
  const std::uint32_t drafts = scheduled.num_computed + scheduled.num_scheduled - expected;
  std::uint32_t accepted = 0;
  while (accepted < drafts && std::uniform_real_distribution<>(0, 1)(rng_) < config_.accepts_draft) ++accepted;
  out.rejected = drafts - accepted;
  item.first_draft = request.sampled;
  for (std::uint32_t i = 0; i < drafts; ++i) {
    const Stamp before = i == 0 ? request.text.stamps[request.sampled - 1] : item.drafts.back();
    const bool right = i < accepted;
    item.drafts.push_back(right ? request.text.stamps[request.sampled + i] : next_stamp(before, -1));
  }
  for (std::uint32_t i = 0; i <= accepted; ++i)
    out.outputs.push_back(next_token(request.text.stamps[request.sampled + i - 1]));
  request.sampled += accepted + 1;
  if (config_.async) request.placeholders += 1 + drafts;
  request.drafts = config_.num_drafts;
  tally_.drafts += drafts;
  tally_.drafts_rejected += out.rejected;
  return item;
}

void MiniEngine::execute(StepPlan plan, const StepInput& input) {
  InFlight step;
  std::vector<ForwardItem> forward;
  for (const ScheduledRequest& scheduled : input.scheduled) {
    Request& request = requests_.at(scheduled.id.value);
    Scheduled& out = step.scheduled.emplace_back();
    out.id = scheduled.id.value;
    out.epoch = request.epoch;
    out.preemptions = request.preemptions;
    out.table = request.executed_table = request.table;
    out.num = scheduled.num_scheduled;
    request.drafts = 0;
    forward.push_back(forward_item(request, scheduled, out));
    request.computed += scheduled.num_scheduled;
    tell("  step {}: {} computes {} tokens at {}", plan.step, out.id, out.num, scheduled.num_computed);
  }
  for (const auto* jobs : {&plan.saves_before, &plan.saves_after})
    for (const SaveJob& job : *jobs)
      tell("  step {}: saves {} tokens of {} in slot {}", plan.step, job.items.at(0).num_tokens, job.request_id,
           job.items.at(0).chunk.slot);
  for (const LoadJob& job : plan.loads) {
    tally_.prepared += preparing_.erase(job.request_id);
    if (job.is_async) step.async_loads.push_back({job.request_id, requests_.at(job.request_id).epoch, true});
  }
  for (const LoadJob& job : plan.abandoned) {  // the request may have been aborted
    const auto found = preparing_.extract(job.request_id);
    if (!found) throw Broken(fmt::format("exactly-once: {} is abandoned, but does not load", job.request_id));
    step.async_loads.push_back({job.request_id, found.mapped().epoch, false});
  }
  const bool failure_unheard =
      std::any_of(in_flight_.begin(), in_flight_.end(), [](const InFlight& s) { return !s.bad_blocks.empty(); });
  for (Worker& worker : workers_) {
    StepOutcome outcome = worker.execute(plan, forward, failure_unheard);
    for (std::size_t i = 0; i < forward.size(); ++i) step.scheduled[i].garbage |= outcome.garbage[i];
    step.bad_blocks.insert(outcome.bad_blocks.begin(), outcome.bad_blocks.end());
    for (std::size_t i = 0; i < outcome.async_ok.size(); ++i)
      if (!outcome.async_ok[i]) step.async_loads.at(i).ok = false;
    step.reports.push_back(std::move(outcome.report));
  }
  for (const Scheduled& scheduled : step.scheduled) tally_.garbage_rows += scheduled.garbage;
  step.plan = std::move(plan);
  in_flight_.push_back(std::move(step));
}

/// Processes the results of a step in vLLM's order: failed loads, then outputs and finished requests, then the workers'
/// reports.
void MiniEngine::take_in(InFlight step, TimeNs now) {
  std::vector<std::string> failed;
  for (const AsyncLoad& load : step.async_loads) {
    const auto found = requests_.find(load.id);
    if (load.ok || found == requests_.end() || found->second.epoch != load.epoch) continue;
    tally_.async_failed += 1;
    found->second.computed = 0;
    if (config_.fails_requests) failed.push_back(load.id);
  }
  if (!step.bad_blocks.empty()) handle_bad_blocks(step, now);
  for (const Scheduled& scheduled : step.scheduled) take_in_output(scheduled, now);
  for (const std::string& id : failed) {
    tally_.failed_by_policy += 1;
    finish(id, End::kFailed, now);
  }
  take_in_saves(step);
  std::vector<ReportedLoad> loads(step.plan.loads.size());
  for (const WorkerReport& report : step.reports) {
    core_.worker_report(report, now);
    for (const SaveDone& save : report.saves)
      if (save.is_in_frame) unwritten_.emplace_back(report.rank, save);
    tell_failed_saves(report);
    check_published();
    for (std::size_t i = 0; i < loads.size(); ++i) {
      loads[i].loaded = std::min(loads[i].loaded, report.loads.at(i).tokens_loaded);
      loads[i].found_damage |= !report.loads[i].corrupt.empty();
    }
  }
  for (std::size_t i = 0; i < loads.size(); ++i) {
    const LoadJob& job = step.plan.loads[i];
    loaded_tokens_ += loads[i].loaded;
    if (const auto found = requests_.find(job.request_id); found != requests_.end())
      found->second.reported_loads[job.attempt] = loads[i];
  }
  take_in_loads(step);
}

/// Counts the saves that end with these reports, which may be of earlier steps.
void MiniEngine::take_in_saves(const InFlight& step) {
  for (const auto* jobs : {&step.plan.saves_before, &step.plan.saves_after})
    for (const SaveJob& job : *jobs)
      for (const SaveItem& item : job.items) late_saves_[item.chunk] = {job.request_id, workers_.size()};
  for (const WorkerReport& report : step.reports) {
    for (const SaveDone& save : report.saves) {
      const auto found = late_saves_.find(save.chunk);
      if (found == late_saves_.end())
        throw Broken(fmt::format("exactly-once: the save of slot {} ends twice", save.chunk.slot));
      if (--found->second.ranks_left == 0) late_saves_.erase(found);
    }
  }
}

void MiniEngine::tell_failed_saves(const WorkerReport& report) const {
  using State = ChunkPool::State;
  for (const SaveDone& save : report.saves) {
    const ChunkPool::Slot& slot = core_.pool().slot(save.chunk.slot);
    const bool has_failed =
        slot.ref == save.chunk && slot.state != State::kReady && (slot.state != State::kWriting || !save.ok);
    if (has_failed && on_save_failed) on_save_failed(slot.meta.key);
  }
}

/// finished_recving: requests that waited for a load may continue. Requests that were aborted meanwhile give back their
/// blocks now.
void MiniEngine::take_in_loads(const InFlight& step) {
  for (const AsyncLoad& load : step.async_loads) {
    if (const auto held = held_back_.find(load.epoch); held != held_back_.end()) {
      blocks_.give_back(held->second);
      held_back_.erase(held);
      continue;
    }
    const auto found = requests_.find(load.id);
    if (found == requests_.end() || found->second.epoch != load.epoch || found->second.load != Request::Load::kUnderWay)
      throw Broken(fmt::format("exactly-once: the engine hears of a load of {} that it does not wait for", load.id));
    const bool ok = load.ok && !std::exchange(found->second.has_bad_blocks, false);
    found->second.load = ok ? Request::Load::kDone : Request::Load::kFailed;
  }
}

void MiniEngine::take_in_output(const Scheduled& scheduled, TimeNs now) {
  const auto found = requests_.find(scheduled.id);
  if (found == requests_.end() || found->second.epoch != scheduled.epoch) {
    tally_.dropped_outputs += 1;
    return;
  }
  Request& request = found->second;
  if (scheduled.outputs.empty()) return;
  if (scheduled.garbage)
    throw Broken(fmt::format("verified-only: request {} says what it read in garbage", scheduled.id));
  const bool stale = scheduled.preemptions != request.preemptions;
  tally_.stale_outputs += stale;
  if (!stale) {
    request.computed -= scheduled.rejected;
    if (request.placeholders > 0)
      request.placeholders -= scheduled.rejected + static_cast<std::uint32_t>(scheduled.outputs.size());
  }
  for (const std::int32_t token : scheduled.outputs) {
    if (request.known >= request.end) break;  // generated after the end of the request
    if (token != request.text.tokens[request.known])
      throw Broken(fmt::format("verified-only: request {} says a wrong token at {}", scheduled.id, request.known));
    request.known += 1;
    outputs_[scheduled.id].push_back(token);
  }
  // An engine that plans ahead learns only now which tokens fill a block.
  const std::uint32_t heard = request.computed - request.placeholders;
  if (config_.async && request.running) cache_blocks(request, heard, heard);
  if (request.known == request.end) {
    tally_.stops += request.end < most(request);
    finish(scheduled.id, End::kDone, now);
  }
}

/// Returns the requests that have a bad block, or KV that was computed from one. Adds all blocks with such KV to `bad`.
std::set<std::string> MiniEngine::affected_by(std::set<BlockId>& bad, const InFlight& step) const {
  std::vector<std::pair<std::string, std::vector<BlockId>>> tables;
  for (const Scheduled& scheduled : step.scheduled) tables.emplace_back(scheduled.id, scheduled.table[0]);
  for (const InFlight& later : in_flight_)
    for (const Scheduled& scheduled : later.scheduled) tables.emplace_back(scheduled.id, scheduled.table[0]);
  for (const auto& [id, request] : requests_) tables.emplace_back(id, request.table[0]);
  const auto first_bad = [&](const std::vector<BlockId>& table) {
    return std::find_if(table.begin(), table.end(), [&](BlockId block) { return bad.contains(block); });
  };
  for (std::size_t before = 0; before != bad.size();) {
    before = bad.size();
    for (const auto& entry : tables) bad.insert(first_bad(entry.second), entry.second.end());
  }
  std::set<std::string> affected;
  for (const auto& [id, table] : tables)
    if (first_bad(table) != table.end() && requests_.contains(id)) affected.insert(id);
  return affected;
}

/// A request that has a block whose load failed goes back to the tokens before it (vLLM: `recompute`) or ends with an
/// error (`fail`).
void MiniEngine::handle_bad_blocks(const InFlight& step, TimeNs now) {
  tally_.bad_loads += 1;
  std::set<BlockId> bad = step.bad_blocks;
  for (const std::string& id : affected_by(bad, step)) {
    Request& request = requests_.at(id);
    const bool is_loading = request.load == Request::Load::kUnderWay;
    if (!is_loading) request.epoch = ++last_epoch_;  // the end of a load that is under way will still be reported
    if (config_.fails_requests) {
      tell("  the load of {} failed, and so does it", id);
      tally_.failed_by_policy += 1;
      finish(id, End::kFailed, now);
      continue;
    }
    tally_.recovered_by_policy += 1;
    request.has_bad_blocks = is_loading;  // the load then counts as failed
    if (is_loading) continue;
    request.placeholders = 0;
    request.drafts = 0;
    request.sampled = request.known;
    const std::vector<BlockId>& table = request.table[0];
    const auto first_bad = std::find_if(table.begin(), table.end(), [&](BlockId b) { return bad.contains(b); });
    const auto keep = static_cast<std::uint32_t>(first_bad - table.begin());
    request.computed = std::min({request.computed, keep * block_tokens_, request.known - 1});
    tell("  a load of {} failed: computes again from {}", id, request.computed);
  }
  for (const BlockId block : bad) blocks_.drop(block);
}

void MiniEngine::abort(const std::string& id, TimeNs now) {
  const auto found = requests_.find(id);
  if (found == requests_.end()) {
    const bool was = finished_.contains(id);
    (was ? tally_.abort_again : tally_.abort_unknown) += 1;
    promises_.ended(id, core_.finished(RequestId{id}, 0, BlockTable(blocks_.groups().size()), true, now), {}, false);
    return;
  }
  const Request& request = found->second;
  using Wait = Request::Wait;
  std::uint64_t* count = &tally_.abort_after_refusal;
  if (request.load == Request::Load::kUnderWay) {
    count = &tally_.abort_while_loading;
  } else if (request.running) {
    count = &tally_.abort_running;
  } else if (request.wait == Wait::kNew) {
    count = &tally_.abort_before_lookup;
  } else if (request.wait == Wait::kPending) {
    count = &tally_.abort_while_pending;
  } else if (request.wait == Wait::kPreempted) {
    count = &tally_.abort_preempted;
  }
  *count += 1;
  tally_.growth_aborted += has_late_save(id);
  finish(id, End::kAborted, now);
}

void MiniEngine::finish(std::string id, End end, TimeNs now) {
  Request& request = requests_.at(id);
  tell("  {} {}", id, end == End::kDone ? "is done" : end == End::kAborted ? "is aborted" : "fails");
  tell_tokens(request);
  // vLLM hands over only the blocks of computed tokens, without those that have left a window.
  const std::uint32_t under_way = in_flight(request);
  blocks_.drop_skipped(request.table, request.computed > under_way ? request.computed - under_way : 0);
  BlockTable table = request.table;
  for (std::size_t g = 0; g < table.size(); ++g)
    table[g].resize(std::min<std::size_t>(table[g].size(), blocks_for(blocks_.groups()[g], request.computed)));
  if (request.running) lost_[id] = {table, truly_computed(request), request.known};
  finished_[id] = core_.finished(RequestId{id}, request.computed, table, end != End::kDone, now);
  promises_.ended(id, finished_[id], request.reported_loads, !request.is_dropped);
  weights_at_end_[id] = weights_;
  for (const Admission& admission : finished_[id].admissions) {
    const bool is_reported = request.reported_loads.contains(admission.attempt);
    tally_.loads_unreported += admission.to_load > 0 && !is_reported;
    tally_.loads_cut += is_reported && admission.loaded < admission.to_load;
  }
  if (request.load == Request::Load::kUnderWay) {
    held_back_[request.epoch] = request.table;
  } else {
    blocks_.give_back(request.table);
  }
  std::erase(running_, id);
  std::erase(waiting_, id);
  std::erase(holding_, id);
  requests_.erase(id);
  if (on_end) on_end(id, end, outputs_[id]);
}

}  // namespace kvferry::sim
