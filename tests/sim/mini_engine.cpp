// Scheduling: what vLLM's Scheduler.schedule() does with its queues.
#include "mini_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "story.h"

namespace kvferry::sim {

MiniEngine::MiniEngine(CoreConfig core, EngineConfig config, StampBook& book)
    : config_(config),
      block_tokens_(core.block_tokens),
      core_(core),
      promises_(core),
      book_(book),
      blocks_(config.num_blocks, core.block_tokens, config.prefix_caching, config.uncached_first, config.windows),
      rng_(config.seed) {
  core_.set_directory_up(false);
  for (std::uint32_t rank = 0; rank < core.num_ranks; ++rank) {
    workers_.emplace_back(rank, config.num_blocks, core.block_tokens, core.num_slots, config.seed, config.windows);
    workers_.back().set_faults(config.faults);
  }
}

void MiniEngine::add(const RequestSpec& spec, TimeNs now) {
  if (requests_.contains(spec.id)) throw Broken(fmt::format("the simulator uses id {} twice", spec.id));
  Request request;
  request.spec = spec;
  request.epoch = ++last_epoch_;
  request.text = say(spec.prompt, spec.max_tokens + config_.num_drafts + 1, false, spec.extras);
  request.known = request.sampled = static_cast<std::uint32_t>(spec.prompt.size());
  request.end = request.known + spec.max_tokens;
  for (std::uint32_t p = request.known; spec.stops && p < request.end; ++p)
    if (is_stop(request.text.tokens[p])) request.end = p + 1;
  request.table.resize(config_.windows.size());
  book_.learn(request.text, spec.extras);
  NewRequest added;
  added.id = RequestId{spec.id};
  added.tokens = spec.prompt;
  added.num_prompt_tokens = request.known;
  added.extras = spec.extras;
  added.cacheable = spec.cacheable;
  added.handoff = spec.handoff;
  added.source = spec.source;
  tell("request {}: {} tokens, says {}", spec.id, request.known, request.end - request.known);
  core_.add_request(added, now);
  tally_.requests += 1;
  tally_.uncacheable += !spec.cacheable;
  tally_.ids_again += finished_.erase(spec.id);
  outputs_[spec.id].clear();
  requests_.emplace(spec.id, std::move(request));
  waiting_.push_back(spec.id);
}

std::vector<BlockId> MiniEngine::table(const std::string& id) const { return requests_.at(id).table[0]; }

void MiniEngine::tell_tokens(const Request& request) {
  const RequestId id{request.spec.id};
  const std::uint32_t told = core_.num_tokens(id);
  core_.update_tokens(id, told, std::span(request.text.tokens).subspan(told, request.known - told));
}

/// Tokens of the request in steps whose outputs have not been taken in.
std::uint32_t MiniEngine::in_flight(const Request& request) const {
  std::uint32_t num = 0;
  for (const InFlight& step : in_flight_)
    for (const Scheduled& scheduled : step.scheduled) num += scheduled.id == request.spec.id ? scheduled.num : 0;
  return num;
}

/// Blocks for `total` tokens, of which the first `computed` are there or being loaded; the hit's come first. Registers
/// what will be full as vLLM does, before it is computed. False: no room.
bool MiniEngine::grow(Request& request, const BlockTable& hit, std::uint32_t total, std::uint32_t computed) {
  const std::size_t before = request.table[0].size();
  if (request.running) {
    const std::uint32_t under_way = in_flight(request);
    blocks_.drop_skipped(request.table, request.computed > under_way ? request.computed - under_way : 0);
  }
  if (!blocks_.take(request.table, hit, (total + block_tokens_ - 1) / block_tokens_, computed)) return false;
  request.table_changed |= request.table[0].size() != before;
  register_full(request, total);
  return true;
}

void MiniEngine::register_full(const Request& request, std::uint32_t tokens) {
  const std::uint32_t full = std::min(tokens, request.known) / block_tokens_;
  for (std::size_t g = 0; g < request.table.size(); ++g)
    for (std::uint32_t b = 0; b < full; ++b)
      blocks_.cache(g, request.table[g][b], request.text.stamps[(b + 1) * block_tokens_ - 1]);
}

void MiniEngine::preempt(std::string id) {  // a copy: callers name one of running_
  Request& request = requests_.at(id);
  tell("  preempts {}", id);
  blocks_.give_back(request.table);
  request.table.assign(config_.windows.size(), {});
  request.computed = 0;
  request.placeholders = 0;
  request.drafts = 0;
  request.preemptions += 1;
  if (config_.delivers) request.epoch = ++last_epoch_;
  request.running = false;
  request.wait = Request::Wait::kPreempted;
  request.loaded_from = request.loaded_to = 0;
  std::erase(running_, id);
  waiting_.push_front(id);
  preempted_.push_back(RequestId{id});
}

void MiniEngine::preempt_all() {
  tally_.resets_running += 1;
  while (!running_.empty()) {
    requests_.at(running_.back()).epoch =
        ++last_epoch_;  // vLLM drops the output in flight, since all may resume at once
    tally_.preempted_by_reset += 1;
    preempt(running_.back());
  }
  blocks_.reset();
}

void MiniEngine::reset_idle_cache() {
  if (!running_.empty()) return;
  tally_.resets_idle += 1;
  blocks_.reset();
}

void MiniEngine::sleep() {
  tell("  sleeps and wakes");
  tally_.sleeps += 1;
  preempt_all();
  core_.reset_cache();
  for (Worker& worker : workers_) worker.wipe_cells();
}

bool MiniEngine::has_output_coming(const Request& request) const {
  return std::any_of(in_flight_.begin(), in_flight_.end(), [&](const InFlight& step) {
    return std::any_of(step.scheduled.begin(), step.scheduled.end(), [&](const Scheduled& scheduled) {
      return scheduled.id == request.spec.id && scheduled.epoch == request.epoch;
    });
  });
}

void MiniEngine::schedule_running(StepInput& input, std::uint32_t& budget) {
  for (std::size_t i = 0; i < running_.size() && budget > 0;) {
    const std::string id = running_[i];
    Request& request = requests_.at(id);
    const std::uint32_t last = most(request) - 1;  // is never computed
    const bool nothing_left = request.placeholders > 0 && request.computed + 2 - request.placeholders >= last + 1;
    const std::uint32_t end = std::min(request.known + request.placeholders + request.drafts, last);
    const std::uint32_t num = end > request.computed ? std::min(end - request.computed, budget) : 0;
    if (nothing_left || num == 0) {
      ++i;
      continue;
    }
    bool room = grow(request, BlockTable(config_.windows.size()), request.computed + num, request.computed);
    while (!room) {
      const std::string victim = running_.back();
      preempt(victim);
      tally_.preemptions += 1;
      if (victim == id) break;
      room = grow(request, BlockTable(config_.windows.size()), request.computed + num, request.computed);
    }
    if (!room) break;
    input.scheduled.push_back({RequestId{id}, request.computed, num, {}});
    budget -= num;
    ++i;
  }
}

/// nullopt: ask again in a later step.
std::optional<Answer> MiniEngine::look_up(Request& request, std::uint32_t num_local, TimeNs now) {
  const RequestId id{request.spec.id};
  const Answer answer = core_.lookup(id, num_local, now);
  tell("  look-up of {}: {} local, {} external{}", id, num_local, answer.num_external, answer.pending ? ", wait" : "");
  const TimeNs pending_for = now - request.pending_since.value_or(now);
  promises_.lookup_answered(id.value, num_local, answer, request.known, pending_for);
  if (std::uniform_real_distribution<>(0, 1)(rng_) < config_.asks_again) {
    const std::size_t holds = core_.pool().num_pins();
    const Answer again = core_.lookup(id, num_local, now);
    promises_.asked_again(id.value, answer, again, holds, core_.pool().num_pins());
    tally_.lookups_again += 1;
  }
  if (!answer.pending) {
    request.pending_since.reset();
    request.wait = Request::Wait::kRefused;  // unless it is allocated
    return answer;
  }
  tally_.lookups_pending += 1;
  request.wait = Request::Wait::kPending;
  if (!request.pending_since) request.pending_since = now;
  return std::nullopt;
}

bool MiniEngine::schedule_first_waiting(StepInput& input, std::uint32_t& budget, std::vector<std::string>& skipped,
                                        TimeNs now) {
  const std::string id = waiting_.front();
  Request& request = requests_.at(id);
  const auto skip = [&] {
    skipped.push_back(id);
    waiting_.pop_front();
    return true;
  };
  if (has_output_coming(request)) return skip();
  tell_tokens(request);
  BlockTable hit(config_.windows.size());
  if (request.spec.cacheable) hit = blocks_.hit(std::span(request.text.stamps).first(request.known));
  const auto num_local = static_cast<std::uint32_t>(hit[0].size()) * block_tokens_;
  const std::optional<Answer> answer = look_up(request, num_local, now);
  if (!answer) return skip();
  std::uint32_t external = answer->num_external;
  const auto refused = [&](std::uint64_t& count, const char* why) {
    tell("  no room for {}: {}", id, why);
    count += 1;
  };
  const Exit exit = refuse ? refuse(id) : Exit::kNone;
  switch (exit) {
    case Exit::kNone:
      break;
    case Exit::kEncoderPending:
      refused(tally_.exit_encoder_pending, "encoder");
      return skip();
    case Exit::kPrefillsDeferred:
      refused(tally_.exit_prefills_deferred, "prefills wait");
      return false;
    case Exit::kDraftsPadded:
      refused(tally_.exit_drafts_padded, "padded drafts");
      return false;
    case Exit::kUnchunked:
      refused(tally_.exit_unchunked, "not chunked");
      return false;
    case Exit::kAlignedSplit:
      refused(tally_.exit_aligned_split, "aligned split");
      return false;
    case Exit::kEncoderBudget:
      refused(tally_.exit_encoder_budget, "encoder budget");
      return false;
    case Exit::kNoBlocks:
      refused(tally_.exit_no_blocks, "blocks");
      return false;
    case Exit::kAnswerDropped:
      tally_.answer_dropped += external > 0;
      external = 0;
      break;
    case Exit::kAnswerTrimmed:
      tally_.answer_trimmed += external > 1;
      external /= 2;
      break;
  }
  const std::uint32_t have = num_local + external;
  if (have >= request.known) throw Broken(fmt::format("sane-counts: nothing is left to compute for request {}", id));
  const std::uint32_t num = std::min(request.known - have, budget);
  const std::uint32_t whole = (request.known + block_tokens_ - 1) / block_tokens_;
  const bool fits = !config_.reserves_whole || blocks_.has_room(request.table, hit, whole, have);
  if (!fits || !grow(request, hit, have + num, have)) {
    refused(tally_.exit_no_blocks, "blocks");
    return false;
  }
  core_.allocated(RequestId{id}, external, request.table, now);
  if (external > 0) {
    admitted_.push_back({id, num_local, external, request.table});
    tally_.sync_loads += 1;
    tally_.resumed_hits += request.preemptions > 0;
    tally_.local_and_external += num_local > 0;
  }
  tally_.prefix_hits += num_local > 0;
  tally_.chunked_prefills += have + num < request.known;
  waiting_.pop_front();
  running_.push_back(id);
  request.running = true;
  if (request.preemptions == 0) first_timers_.insert(id);
  request.computed = have;
  request.sampled = request.known;
  request.loaded_from = num_local;
  request.loaded_to = have;
  input.scheduled.push_back({RequestId{id}, have, num, {}});
  budget -= num;
  return true;
}

void MiniEngine::schedule_waiting(StepInput& input, std::uint32_t& budget, TimeNs now) {
  std::vector<std::string> skipped;
  while (budget > 0 && !waiting_.empty() && running_.size() < config_.max_running)
    if (!schedule_first_waiting(input, budget, skipped, now)) break;
  waiting_.insert(waiting_.begin(), skipped.begin(), skipped.end());
}

void MiniEngine::step(TimeNs now) {
  tally_.steps += 1;
  StepInput input;
  std::uint32_t budget = config_.token_budget;
  admitted_.clear();
  first_timers_.clear();
  const std::size_t preempted_before = preempted_.size();
  schedule_running(input, budget);
  if (preempted_.size() == preempted_before) schedule_waiting(input, budget, now);
  input.preempted = std::exchange(preempted_, {});
  // vLLM names who is there for the first time before all others.
  std::stable_partition(input.scheduled.begin(), input.scheduled.end(),
                        [&](const ScheduledRequest& row) { return first_timers_.contains(row.id.value); });
  for (ScheduledRequest& scheduled : input.scheduled) {
    Request& request = requests_.at(scheduled.id.value);
    tell_tokens(request);
    if (std::exchange(request.table_changed, false)) scheduled.block_ids = request.table;
  }
  for (const RequestId& id : input.preempted)
    if (const auto found = requests_.find(id.value); found != requests_.end()) tell_tokens(found->second);
  if (on_step) on_step(input);
  StepPlan plan = core_.build_step(input, now);
  std::vector<const StepPlan*> under_way;
  for (const InFlight& step : in_flight_) under_way.push_back(&step.plan);
  under_way.push_back(&plan);
  promises_.plan_built(core_, admitted_, under_way);
  for (const ScheduledRequest& scheduled : input.scheduled) {
    const Request& request = requests_.at(scheduled.id.value);
    for (const SaveJob& job : plan.saves_after)
      if (job.request_id == scheduled.id.value)
        promises_.save_planned(job, request.table, scheduled.num_computed + scheduled.num_scheduled, request.known);
  }
  plans_.push_back(plan);
  execute(std::move(plan), input);
  const std::size_t lag = config_.async ? 1 : 0;
  while (in_flight_.size() > lag) {
    InFlight due = std::move(in_flight_.front());
    in_flight_.pop_front();
    take_in(std::move(due), now);
  }
  std::size_t loads_in_flight = 0;
  for (const InFlight& coming : in_flight_) loads_in_flight += coming.plan.loads.size();
  promises_.after_step(core_, loads_in_flight, now);
}

}  // namespace kvferry::sim
