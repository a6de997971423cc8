// What vLLM's Scheduler.schedule() does with waiting requests: lookup, allocation, and everything that may happen
// between the two.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "mini_engine.h"
#include "schedule_log.h"

namespace kvferry::sim {

/// Returns nullopt if the lookup must be repeated in a later step.
std::optional<Answer> MiniEngine::lookup(Request& request, std::uint32_t num_local, TimeNs now) {
  const RequestId id{request.spec.id};
  const Answer answer = core_.lookup(id, num_local, now);
  tell("  lookup of {}: {} local, {} external{}", id, num_local, answer.num_external, answer.pending ? ", wait" : "");
  const TimeNs pending_for = request.spec.prepares ? 0 : now - request.pending_since.value_or(now);
  promises_.lookup_answered(id.value, num_local, answer, request.known, pending_for);
  if (std::uniform_real_distribution<>(0, 1)(rng_) < config_.asks_again) {
    const std::size_t holds = core_.pool().num_pins();
    const Answer again = core_.lookup(id, num_local, now);
    promises_.asked_again(id.value, answer, again, holds, core_.pool().num_pins());
    tally_.lookups_again += 1;
  }
  if (!answer.pending) {
    request.pending_since.reset();
    request.wait = Request::Wait::kRefused;  // the state until blocks are allocated
    return answer;
  }
  tally_.lookups_pending += 1;
  request.wait = Request::Wait::kPending;
  if (!request.pending_since) request.pending_since = now;
  return std::nullopt;
}

/// Does what vLLM's scheduler may do between a lookup and an allocation, without telling the connector. Returns true if
/// no allocation follows.
bool MiniEngine::is_given_up(const std::string& id, std::uint32_t& external, Next& next) {
  const auto give_up = [&](std::uint64_t& count, const char* why, Next then) {
    tell("  no room for {}: {}", id, why);
    count += 1;
    next = then;
    return true;
  };
  const bool is_async = core_.loads_async() || requests_.at(id).spec.prepares;
  switch (refuse ? refuse(id) : Exit::kNone) {
    case Exit::kNone:
      break;
    case Exit::kEncoderPending:
      return give_up(tally_.exit_encoder_pending, "encoder", Next::kSkip);
    case Exit::kPrefillsDeferred:
      return give_up(tally_.exit_prefills_deferred, "prefills wait", Next::kWait);
    case Exit::kDraftsPadded:
      return give_up(tally_.exit_drafts_padded, "padded drafts", Next::kWait);
    case Exit::kUnchunked:
      return give_up(tally_.exit_unchunked, "not chunked", Next::kWait);
    case Exit::kAlignedSplit:
      return give_up(tally_.exit_aligned_split, "aligned split", Next::kWait);
    case Exit::kEncoderBudget:
      return give_up(tally_.exit_encoder_budget, "encoder budget", Next::kWait);
    case Exit::kNoBlocks:
      return give_up(tally_.exit_no_blocks, "blocks", Next::kWait);
    case Exit::kAnswerDropped:
      if (requests_.at(id).spec.prepares) break;  // vLLM drops answers of requests for logprobs alone
      tally_.answer_dropped += external > 0;
      external = 0;
      break;
    case Exit::kAnswerTrimmed:
      if (is_async) break;  // vLLM takes an asynchronous answer whole or not at all
      tally_.answer_trimmed += external > 1;
      external /= 2;
      if (whole_blocks_) external -= external % block_tokens_;
      break;
  }
  return false;
}

/// Returns how many blocks the running prefills still need. vLLM gives these blocks to no asynchronous load, because a
/// load can't be preempted.
std::uint32_t MiniEngine::reserved_blocks() const {
  std::uint32_t num = 0;
  for (const auto& [id, request] : requests_) {
    const bool is_prefilling = request.load != Request::Load::kNone ||
                               (request.running && request.computed < request.known + request.placeholders);
    if (!is_prefilling) continue;
    for (std::size_t g = 0; g < request.table.size(); ++g) {
      const auto has = static_cast<std::uint32_t>(request.table[g].size());
      const std::uint32_t wanted = blocks_for(blocks_.groups()[g], request.known);
      num += wanted > has ? wanted - has : 0;
    }
  }
  return num;
}

/// Allocates blocks for an asynchronous load. The prefix cache does not find them before the load is done.
MiniEngine::Next MiniEngine::admit_async(Request& request, const BlockTable& hit, std::uint32_t num_local,
                                         std::uint32_t external, TimeNs now) {
  const std::string& id = request.spec.id;
  std::uint32_t wanted = reserved_blocks();
  for (const KvGroup& group : blocks_.groups()) wanted += blocks_for(group, request.known);
  const bool is_reserved = wanted > blocks_.num_free();
  request.load = Request::Load::kUnderWay;
  if (is_reserved || !grow(request, hit, num_local + external, num_local + external)) {
    request.load = Request::Load::kNone;
    tally_.exit_no_blocks += 1;
    tell("  no room for {}: blocks", id);
    return Next::kWait;
  }
  tell("  {} waits for its load", id);
  core_.allocated(RequestId{id}, external, request.table, now);
  first_admitted_.try_emplace(id, now);
  if (request.spec.prepares)
    preparing_[id] = {{id, num_local, external, request.table, true}, request.epoch};
  else
    admitted_.push_back({id, num_local, external, request.table});
  tally_.preparations += request.spec.prepares;
  tally_.async_loads += 1;
  tally_.state_loads += blocks_.groups().back().window == kState;
  tally_.resumed_hits += request.preemptions > 0;
  tally_.local_and_external += num_local > 0;
  request.computed = num_local + external;
  request.loaded_from = num_local;
  request.loaded_to = request.computed;
  std::erase(waiting_, id);
  // after a failed load, the request keeps its place in holding_
  if (!std::ranges::count(holding_, id)) holding_.push_back(id);
  return Next::kGoOn;
}

/// Ends an asynchronous load: registers its blocks in the prefix cache or, if the load failed, gives them back for
/// another lookup.
void MiniEngine::take_loaded(Request& request) {
  if (request.load == Request::Load::kFailed) {
    tell("  the load of {} failed", request.spec.id);
    blocks_.give_back(request.table);
    request.table.assign(blocks_.groups().size(), {});
    request.computed = request.loaded_from = request.loaded_to = 0;
  } else if (request.load == Request::Load::kDone) {
    cache_blocks(request, request.computed, request.computed);
  }
  request.load = Request::Load::kNone;
}

MiniEngine::Next MiniEngine::schedule_one_waiting(const std::string& id, StepInput& input, std::uint32_t& budget,
                                                  TimeNs now) {
  Request& request = requests_.at(id);
  if (request.load == Request::Load::kUnderWay || has_output_coming(request)) return Next::kSkip;
  if (std::exchange(request.is_dropped, false)) tell_request(request, now);
  tell_tokens(request);
  take_loaded(request);
  const bool is_loaded = request.computed > 0;  // vLLM makes no lookup for a loaded request
  BlockTable hit(blocks_.groups().size());
  std::uint32_t num_local = 0, external = 0;
  bool is_async = false;
  if (!is_loaded) {
    if (request.spec.cacheable) hit = blocks_.hit(std::span(request.text.stamps).first(request.known));
    num_local = static_cast<std::uint32_t>(hit[0].size()) * block_tokens_;
    const std::optional<Answer> answer = lookup(request, num_local, now);
    if (!answer) return Next::kSkip;
    external = answer->num_external;
    is_async = answer->is_async;
  }
  Next next = Next::kGoOn;
  if (is_given_up(id, external, next)) return next;
  if (is_async && external > 0) return admit_async(request, hit, num_local, external, now);
  const std::uint32_t have = is_loaded ? request.computed : num_local + external;
  if (have >= request.known) throw Broken(fmt::format("sane-counts: nothing is left to compute for request {}", id));
  const std::uint32_t num = split(request, have, std::min(request.known - have, budget));
  const bool fits = !config_.reserves_whole || blocks_.has_room(request.table, hit, request.known, have);
  if (!fits || !grow(request, hit, have + num, have)) {
    tell("  no room for {}: blocks", id);
    tally_.exit_no_blocks += 1;
    return Next::kWait;
  }
  core_.allocated(RequestId{id}, external, request.table, now);
  first_admitted_.try_emplace(id, now);
  if (external > 0) {
    admitted_.push_back({id, num_local, external, request.table});
    tally_.sync_loads += 1;
    tally_.resumed_hits += request.preemptions > 0;
    tally_.local_and_external += num_local > 0;
  }
  if (!is_loaded) {
    request.loaded_from = num_local;
    request.loaded_to = have;
  }
  tally_.prefix_hits += num_local > 0;
  tally_.chunked_prefills += have + num < request.known;
  std::erase(holding_, id);
  std::erase(waiting_, id);
  running_.push_back(id);
  request.running = true;
  if (request.preemptions == 0) first_timers_.insert(id);
  request.computed = have;
  request.sampled = request.known;
  request.is_admitted = true;
  input.scheduled.push_back({RequestId{id}, have, num, {}});
  budget -= num;
  return Next::kGoOn;
}

/// Requests that hold blocks come first. A request that is skipped keeps its place, unless it has lost its blocks by a
/// failed load. Then it becomes the first of the requests without blocks.
void MiniEngine::schedule_waiting(StepInput& input, std::uint32_t& budget, TimeNs now) {
  std::vector<std::string> order(holding_.begin(), holding_.end());
  order.insert(order.end(), waiting_.begin(), waiting_.end());
  std::vector<std::string> without_blocks;
  for (const std::string& id : order) {
    if (budget == 0 || running_.size() >= config_.max_running) break;
    const Next next = schedule_one_waiting(id, input, budget, now);
    if (next == Next::kWait) break;
    const Request& request = requests_.at(id);
    const bool holds = request.computed > 0 || request.load != Request::Load::kNone;
    if (next == Next::kSkip && !holds && std::erase(holding_, id) > 0) without_blocks.push_back(id);
  }
  waiting_.insert(waiting_.begin(), without_blocks.begin(), without_blocks.end());
}

}  // namespace kvferry::sim
