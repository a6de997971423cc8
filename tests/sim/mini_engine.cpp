// The step of the engine, and what vLLM's Scheduler.schedule() does with running requests.
#include "mini_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "schedule_log.h"

namespace kvferry::sim {

namespace {

std::vector<KvGroup> groups_of(const CoreConfig& core) {
  std::vector<KvGroup> groups = core.groups;
  for (KvGroup& group : groups) group.window = core.keeps_state && group.window != 0 ? kState : group.window;
  return groups;
}

}  // namespace

MiniEngine::MiniEngine(CoreConfig core, EngineConfig config, StampBook& book, std::vector<Shard> shards,
                       std::vector<ShardParts> parts)
    : config_(config),
      block_tokens_(core.groups.at(0).block_tokens),
      whole_blocks_(core.whole_blocks),
      core_(core),
      promises_(core),
      book_(book),
      blocks_(config.num_blocks, config.prefix_caching, config.uncached_first, groups_of(core)),
      checkpoint_alignment_(core.checkpoint_alignment),
      rng_(config.seed) {
  core_.set_directory_up(false);
  for (std::uint32_t rank = 0; rank < core.num_ranks; ++rank) {
    const Shard shard = rank < shards.size() ? shards[rank] : Shard{0, 1, rank, 1};
    workers_.emplace_back(rank, shard, config.num_blocks, core.num_slots, config.seed, blocks_.groups(),
                          rank < parts.size() ? parts[rank] : ShardParts{});
    workers_.back().set_faults(config.faults);
    workers_.back().set_checkpoints(core.checkpoint_alignment);
  }
}

std::vector<BlockId> MiniEngine::table(const std::string& id) const { return requests_.at(id).table[0]; }

void MiniEngine::tell_tokens(const Request& request) {
  const RequestId id{request.spec.id};
  const std::uint32_t told = core_.num_tokens(id);
  core_.update_tokens(id, told, std::span(request.text.tokens).subspan(told, request.known - told));
}

/// Returns the number of the request's tokens in steps whose outputs are not processed yet.
std::uint32_t MiniEngine::in_flight(const Request& request) const {
  std::uint32_t num = 0;
  for (const InFlight& step : in_flight_)
    for (const Scheduled& scheduled : step.scheduled) num += scheduled.id == request.spec.id ? scheduled.num : 0;
  return num;
}

/// Allocates blocks for `total` tokens, of which the first `computed` are computed or being loaded. The blocks of the
/// hit come first. Like vLLM, registers blocks that will be full in the prefix cache before they are computed. Returns
/// false if there are too few free blocks.
bool MiniEngine::grow(Request& request, const BlockTable& hit, std::uint32_t total, std::uint32_t computed) {
  if (request.running) {
    const std::uint32_t under_way = in_flight(request);
    blocks_.drop_skipped(request.table, request.computed > under_way ? request.computed - under_way : 0);
  }
  if (!blocks_.take(request.table, hit, total, computed)) return false;
  if (request.load != Request::Load::kUnderWay) cache_blocks(request, total, computed);
  return true;
}

void MiniEngine::cache_blocks(Request& request, std::uint32_t total, std::uint32_t computed) {
  const std::uint32_t checkpoint = checkpoint_in(computed, total, block_tokens_, checkpoint_alignment_);
  for (std::size_t g = 0; g < request.table.size(); ++g) {
    const KvGroup& group = blocks_.groups()[g];
    for (std::uint32_t b = 0, end = group.block_tokens; end <= std::min(total, request.known);
         ++b, end += group.block_tokens)
      if (group.window != kState || end == total || end == checkpoint)
        blocks_.cache(g, request.table[g][b], request.text.stamps[end - 1]);
  }
}

void MiniEngine::preempt(std::string id) {  // `id` is a copy, because callers pass an element of running_
  Request& request = requests_.at(id);
  tell("  preempts {}", id);
  lost_[id] = {request.executed_table, truly_computed(request), request.known};
  blocks_.give_back(request.table);
  request.table.assign(blocks_.groups().size(), {});
  request.computed = 0;
  request.placeholders = 0;
  request.drafts = 0;
  request.preemptions += 1;
  tally_.growth_preempted += has_late_save(id);
  if (config_.delivers) request.epoch = ++last_epoch_;
  request.running = false;
  request.wait = Request::Wait::kPreempted;
  request.loaded_from = request.loaded_to = 0;
  std::erase(running_, id);
  waiting_.push_front(id);
  preempted_.push_back(RequestId{id});
}

void MiniEngine::preempt_all() {
  if (!holding_.empty()) return;  // vLLM refuses the reset while a request waits for a load
  tally_.resets_running += 1;
  while (!running_.empty()) {
    requests_.at(running_.back()).epoch =
        ++last_epoch_;  // vLLM drops the outputs of the steps in flight, because the requests may resume at once
    tally_.preempted_by_reset += 1;
    preempt(running_.back());
  }
  blocks_.reset();
}

void MiniEngine::reset_idle_cache() {
  if (!running_.empty() || !holding_.empty() || !held_back_.empty()) return;
  tally_.resets_idle += 1;
  blocks_.reset();
}

void MiniEngine::sleep() {
  if (!holding_.empty() || !held_back_.empty()) return;
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

/// Returns how many of `num` tokens after `from` a step may compute. In a model with state, the steps of a prefill end
/// at block boundaries if possible.
std::uint32_t MiniEngine::split(const Request& request, std::uint32_t from, std::uint32_t num) const {
  if (blocks_.groups().back().window != kState || from + 1 >= request.known) return num;
  const std::uint32_t last = (request.known - 1) / block_tokens_ * block_tokens_;
  std::uint32_t end = from + num;
  if (end < request.known && end / block_tokens_ * block_tokens_ > from) end -= end % block_tokens_;
  if (from % block_tokens_ != 0) end = std::min(end, (from / block_tokens_ + 1) * block_tokens_);
  const bool stops = from < last && checkpoint_in(from, end, block_tokens_, checkpoint_alignment_) != last;
  return (stops ? std::min(end, last) : end) - from;
}

void MiniEngine::schedule_running(StepInput& input, std::uint32_t& budget) {
  for (std::size_t i = 0; i < running_.size() && budget > 0;) {
    const std::string id = running_[i];
    Request& request = requests_.at(id);
    const std::uint32_t last = most(request) - 1;  // the last token is never computed
    const bool nothing_left = request.placeholders > 0 && request.computed + 2 - request.placeholders >= last + 1;
    const std::uint32_t end = std::min(request.known + request.placeholders + request.drafts, last);
    const std::uint32_t most = end > request.computed ? std::min(end - request.computed, budget) : 0;
    const std::uint32_t num = split(request, request.computed, most);
    if (nothing_left || num == 0) {
      ++i;
      continue;
    }
    bool room = grow(request, BlockTable(blocks_.groups().size()), request.computed + num, request.computed);
    while (!room) {
      const std::string victim = running_.back();
      preempt(victim);
      tally_.preemptions += 1;
      if (victim == id) break;
      room = grow(request, BlockTable(blocks_.groups().size()), request.computed + num, request.computed);
    }
    if (!room) break;
    input.scheduled.push_back({RequestId{id}, request.computed, num, {}});
    budget -= num;
    ++i;
  }
}

/// Passes tokens and block tables to the core, either whole or only their new parts.
void MiniEngine::tell_step(StepInput& input) {
  for (const RequestId& id : input.preempted)
    if (const auto found = requests_.find(id.value); found != requests_.end()) tell_tokens(found->second);
  for (ScheduledRequest& scheduled : input.scheduled) {
    Request& request = requests_.at(scheduled.id.value);
    std::vector<std::size_t> sizes;
    for (const std::vector<BlockId>& group : request.table) sizes.push_back(group.size());
    if (!config_.tells_late) tell_tokens(request);
    request.blocks_added.clear();
    if (std::exchange(request.is_admitted, false) || (!config_.tells_late && sizes != request.blocks_told)) {
      scheduled.block_ids = request.table;
    } else if (sizes != request.blocks_told) {
      for (std::size_t g = 0; g < sizes.size(); ++g)
        request.blocks_added.emplace_back(
            request.table[g].begin() + static_cast<std::ptrdiff_t>(request.blocks_told[g]), request.table[g].end());
    }
    request.blocks_told = std::move(sizes);
  }
}

/// Returns the step as the connector tells it: only requests that are scheduled for the first time are named by their
/// ids, all others by the handles that they had in the step before or, after a step without them, get now.
StepInput MiniEngine::as_told(const StepInput& input) {
  StepInput told;
  told.preempted = input.preempted;
  std::map<std::string, RequestHandle> handles;
  for (const ScheduledRequest& row : input.scheduled) {
    const std::string& id = row.id.value;
    if (first_timers_.contains(id)) {
      told.scheduled.push_back(row);
      continue;
    }
    const auto known = row.block_ids ? handles_.end() : handles_.find(id);
    const RequestHandle handle = known == handles_.end() ? core_.handle_of(row.id) : known->second;
    handles[id] = handle;
    told.running.push_back({handle, row.num_computed, row.num_scheduled});
    const BlockTable& added = requests_.at(id).blocks_added;
    if (row.block_ids) told.block_changes.push_back({handle, *row.block_ids, true});
    if (!added.empty()) told.block_changes.push_back({handle, added, false});
  }
  handles_ = std::move(handles);
  return told;
}

void MiniEngine::step(TimeNs now) {
  tally_.steps += 1;
  StepInput input;
  std::uint32_t budget = config_.token_budget;
  admitted_.clear();
  first_timers_.clear();
  blocks_.start_step();
  const std::size_t preempted_before = preempted_.size();
  schedule_running(input, budget);
  if (preempted_.size() == preempted_before) schedule_waiting(input, budget, now);
  input.preempted = std::exchange(preempted_, {});
  // vLLM lists requests that are scheduled for the first time before all others.
  std::stable_partition(input.scheduled.begin(), input.scheduled.end(),
                        [&](const ScheduledRequest& row) { return first_timers_.contains(row.id.value); });
  tell_step(input);
  if (on_step) on_step(input);
  const TokenSource tokens = [this](const RequestId& id, std::uint32_t known) {
    const Request& request = requests_.at(id.value);
    return std::vector(request.text.tokens.begin() + known, request.text.tokens.begin() + request.known);
  };
  // vLLM takes in outputs in the order of scheduling, in which requests that ran before come first.
  std::stable_partition(input.scheduled.begin(), input.scheduled.end(),
                        [&](const ScheduledRequest& row) { return !first_timers_.contains(row.id.value); });
  StepPlan plan = core_.build_step(as_told(input), now, config_.tells_late ? tokens : TokenSource{});
  for (const LoadJob& job : plan.loads)
    if (const auto found = preparing_.find(job.request_id); found != preparing_.end())
      admitted_.push_back(found->second.load);
  std::vector<const StepPlan*> under_way;
  for (const InFlight& step : in_flight_) under_way.push_back(&step.plan);
  under_way.push_back(&plan);
  std::vector<ChunkRef> late;
  for (const auto& [chunk, save] : late_saves_) late.push_back(chunk);
  promises_.plan_built(core_, admitted_, under_way, late);
  check_saves(plan, input);
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
