#include "mini_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace kvferry::sim {

MiniEngine::MiniEngine(CoreConfig core, EngineConfig config, StampBook& book)
    : config_(config),
      block_tokens_(core.block_tokens),
      core_(core),
      book_(book),
      blocks_(config.num_blocks, core.block_tokens, config.prefix_caching, config.uncached_first) {
  core_.set_directory_up(false);
  for (std::uint32_t rank = 0; rank < core.num_ranks; ++rank) {
    workers_.emplace_back(rank, config.num_blocks, core.block_tokens, core.num_slots, config.seed);
    workers_.back().set_faults(config.faults);
  }
}

void MiniEngine::add(const RequestSpec& spec, TimeNs now) {
  Request request;
  request.spec = spec;
  request.text = say(spec.prompt, spec.max_tokens, spec.stops, spec.extras);
  request.known = static_cast<std::uint32_t>(spec.prompt.size());
  book_.learn(request.text, spec.extras);
  NewRequest added;
  added.id = RequestId{spec.id};
  added.tokens = spec.prompt;
  added.num_prompt_tokens = request.known;
  added.extras = spec.extras;
  added.handoff = spec.handoff;
  added.source = spec.source;
  core_.add_request(added, now);
  requests_.emplace(spec.id, std::move(request));
  outputs_[spec.id].clear();
  waiting_.push_back(spec.id);
}

std::vector<BlockId> MiniEngine::table(const std::string& id) const { return requests_.at(id).table; }

void MiniEngine::tell_tokens(const Request& request) {
  const RequestId id{request.spec.id};
  const std::uint32_t told = core_.num_tokens(id);
  core_.update_tokens(id, told, std::span(request.text.tokens).subspan(told, request.known - told));
}

/// Blocks for `total` tokens, the first of them in `hit`; registers what will be full as vLLM does, before it is
/// computed. False: no room.
bool MiniEngine::grow(Request& request, std::span<const BlockId> hit, std::uint32_t total) {
  const std::uint32_t wanted = (total + block_tokens_ - 1) / block_tokens_;
  const auto have = static_cast<std::uint32_t>(request.table.size() + hit.size());
  const auto taken = blocks_.take(hit, wanted > have ? wanted - have : 0);
  if (!taken) return false;
  request.table.insert(request.table.end(), taken->begin(), taken->end());
  request.table_changed |= !taken->empty();
  const std::uint32_t full = std::min(total, request.known) / block_tokens_;
  for (std::uint32_t b = 0; b < full; ++b)
    blocks_.cache(request.table[b], request.text.stamps[(b + 1) * block_tokens_ - 1]);
  return true;
}

void MiniEngine::preempt(const std::string& id) {
  Request& request = requests_.at(id);
  blocks_.give_back(request.table);
  request.table.clear();
  request.computed = 0;
  request.placeholders = 0;
  std::erase(running_, id);
  waiting_.push_front(id);
  preempted_.push_back(RequestId{id});
  num_preemptions_ += 1;
}

void MiniEngine::preempt_all() {
  while (!running_.empty()) {
    requests_.at(running_.back()).epoch += 1;  // vLLM drops the output in flight, since all may resume at once
    preempt(running_.back());
  }
  blocks_.reset();
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
    const std::uint32_t most = static_cast<std::uint32_t>(request.spec.prompt.size()) + request.spec.max_tokens;
    const bool nothing_left = request.placeholders > 0 && request.computed + 2 - request.placeholders >= most;
    const std::uint32_t num = std::min(request.known + request.placeholders - request.computed, budget);
    if (nothing_left || num == 0) {
      ++i;
      continue;
    }
    bool room = grow(request, {}, request.computed + num);
    while (!room) {
      const std::string victim = running_.back();
      preempt(victim);
      if (victim == id) break;
      room = grow(request, {}, request.computed + num);
    }
    if (!room) break;
    input.scheduled.push_back({RequestId{id}, request.computed, num, {}});
    budget -= num;
    ++i;
  }
}

void MiniEngine::schedule_waiting(StepInput& input, std::uint32_t& budget, TimeNs now) {
  std::vector<std::string> skipped;
  while (budget > 0 && !waiting_.empty() && running_.size() < config_.max_running) {
    const std::string id = waiting_.front();
    Request& request = requests_.at(id);
    const auto skip = [&] {
      skipped.push_back(id);
      waiting_.pop_front();
    };
    if (has_output_coming(request)) {
      skip();
      continue;
    }
    tell_tokens(request);
    const std::vector<BlockId> hit = blocks_.hit(std::span(request.text.stamps).first(request.known));
    const auto num_local = static_cast<std::uint32_t>(hit.size()) * block_tokens_;
    const Answer answer = core_.lookup(RequestId{id}, num_local, now);
    if (answer.pending) {
      skip();
      continue;
    }
    const Refusal refusal = refuse ? refuse(id) : Refusal::kNone;
    if (refusal == Refusal::kBreak) break;
    if (refusal == Refusal::kSkip) {
      skip();
      continue;
    }
    const std::uint32_t have = num_local + answer.num_external;
    if (have >= request.known) throw Broken(fmt::format("nothing is left to compute for request {}", id));
    const std::uint32_t num = std::min(request.known - have, budget);
    if (!grow(request, hit, have + num)) break;
    core_.allocated(RequestId{id}, answer.num_external, {request.table}, now);
    waiting_.pop_front();
    running_.push_back(id);
    request.computed = have;
    input.scheduled.push_back({RequestId{id}, have, num, {}});
    budget -= num;
  }
  waiting_.insert(waiting_.begin(), skipped.begin(), skipped.end());
}

void MiniEngine::step(TimeNs now) {
  StepInput input;
  std::uint32_t budget = config_.token_budget;
  const std::size_t preempted_before = preempted_.size();
  schedule_running(input, budget);
  if (preempted_.size() == preempted_before) schedule_waiting(input, budget, now);
  input.preempted = std::exchange(preempted_, {});
  for (ScheduledRequest& scheduled : input.scheduled) {
    Request& request = requests_.at(scheduled.id.value);
    tell_tokens(request);
    if (std::exchange(request.table_changed, false)) scheduled.block_ids = BlockTable{request.table};
  }
  StepPlan plan = core_.build_step(input, now);
  if (core_.num_open_lookups() != 0) throw Broken("a look-up outlives its step");
  execute(plan, input);
  plans_.push_back(std::move(plan));
  const std::size_t lag = config_.async ? 1 : 0;
  while (in_flight_.size() > lag) {
    InFlight due = std::move(in_flight_.front());
    in_flight_.pop_front();
    take_in(std::move(due), now);
  }
}

void MiniEngine::execute(const StepPlan& plan, const StepInput& input) {
  InFlight step;
  std::vector<ForwardItem> forward;
  for (const ScheduledRequest& scheduled : input.scheduled) {
    Request& request = requests_.at(scheduled.id.value);
    forward.push_back(
        {scheduled.id.value, &request.text.stamps, request.table, scheduled.num_computed, scheduled.num_scheduled});
    request.computed += scheduled.num_scheduled;
    Scheduled& out = step.scheduled.emplace_back();
    out.id = scheduled.id.value;
    out.epoch = request.epoch;
    out.table = request.table;
    out.samples = request.computed >= request.known + request.placeholders;
    out.output = next_token(request.text.stamps[request.computed - 1]);
    if (out.samples && config_.async) request.placeholders += 1;
  }
  const bool failure_unheard =
      std::any_of(in_flight_.begin(), in_flight_.end(), [](const InFlight& s) { return !s.bad_blocks.empty(); });
  for (Worker& worker : workers_) {
    StepOutcome outcome = worker.execute(plan, forward, failure_unheard);
    for (std::size_t i = 0; i < forward.size(); ++i)
      if (outcome.garbage[i]) step.scheduled[i].garbage = true;
    step.bad_blocks.insert(outcome.bad_blocks.begin(), outcome.bad_blocks.end());
    step.reports.push_back(std::move(outcome.report));
  }
  in_flight_.push_back(std::move(step));
}

/// vLLM's order: failed loads, then outputs and finished requests, and the workers' reports last.
void MiniEngine::take_in(InFlight step, TimeNs now) {
  if (!step.bad_blocks.empty()) recover(step);
  for (const Scheduled& scheduled : step.scheduled) {
    const auto found = requests_.find(scheduled.id);
    if (found == requests_.end() || found->second.epoch != scheduled.epoch || !scheduled.samples) continue;
    Request& request = found->second;
    if (scheduled.garbage) throw Broken(fmt::format("request {} says what it read in garbage", scheduled.id));
    if (request.placeholders > 0) request.placeholders -= 1;
    if (request.known >= request.text.tokens.size()) continue;  // said after the stop token
    if (scheduled.output != request.text.tokens[request.known])
      throw Broken(fmt::format("request {} says a wrong token at {}", scheduled.id, request.known));
    request.known += 1;
    outputs_[scheduled.id].push_back(scheduled.output);
    if (request.known == request.text.tokens.size()) finish(scheduled.id, false, now);
  }
  for (const WorkerReport& report : step.reports) core_.worker_report(report, now);
}

/// Whoever has a block whose load failed, or KV computed from it, goes back to before it (vLLM: `recompute`).
void MiniEngine::recover(const InFlight& step) {
  num_failed_loads_ += 1;
  std::set<BlockId> bad = step.bad_blocks;
  std::vector<std::pair<std::string, std::vector<BlockId>>> tables;
  for (const Scheduled& scheduled : step.scheduled) tables.emplace_back(scheduled.id, scheduled.table);
  for (const InFlight& later : in_flight_)
    for (const Scheduled& scheduled : later.scheduled) tables.emplace_back(scheduled.id, scheduled.table);
  for (const auto& [id, request] : requests_) tables.emplace_back(id, request.table);
  const auto first_bad = [&](const std::vector<BlockId>& table) {
    return std::find_if(table.begin(), table.end(), [&](BlockId block) { return bad.contains(block); });
  };
  for (std::size_t before = 0; before != bad.size();) {
    before = bad.size();
    for (const auto& entry : tables) bad.insert(first_bad(entry.second), entry.second.end());
  }
  std::set<std::string> affected;
  for (const auto& [id, table] : tables)
    if (first_bad(table) != table.end()) affected.insert(id);
  for (const std::string& id : affected) {
    const auto found = requests_.find(id);
    if (found == requests_.end()) continue;
    Request& request = found->second;
    request.epoch += 1;
    request.placeholders = 0;
    const auto keep = static_cast<std::uint32_t>(first_bad(request.table) - request.table.begin());
    request.computed = std::min({request.computed, keep * block_tokens_, request.known - 1});
  }
  for (const BlockId block : bad) blocks_.forget(block);
}

void MiniEngine::abort(const std::string& id, TimeNs now) {
  if (requests_.contains(id)) finish(id, true, now);
}

void MiniEngine::finish(const std::string& id, bool aborted, TimeNs now) {
  Request& request = requests_.at(id);
  tell_tokens(request);
  finished_[id] = core_.finished(RequestId{id}, request.computed, {request.table}, aborted, now);
  blocks_.give_back(request.table);
  std::erase(running_, id);
  std::erase(waiting_, id);
  requests_.erase(id);
}

std::vector<Action> MiniEngine::take_actions() {
  std::vector<Action> actions = core_.take_actions();
  for (const Action& action : actions) {
    const auto* published = std::get_if<ChunksPublished>(&action);
    if (published == nullptr) continue;
    for (const ChunkMeta& chunk : published->chunks) {
      const ChunkPool::Slot* slot = core_.pool().find(chunk.key);
      if (slot == nullptr || slot->state != ChunkPool::State::kReady) continue;  // evicted since
      for (const Worker& worker : workers_)
        if (!worker.damaged(slot->ref.slot)) book_.check_chunk(chunk.key, worker.plain(slot->ref.slot));
    }
  }
  return actions;
}

}  // namespace kvferry::sim
