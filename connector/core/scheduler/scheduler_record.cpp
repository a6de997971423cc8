// Records the events of requests' lives in the flight recorder, and why a request is computed instead of loaded.
#include <algorithm>
#include <utility>

#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry {

LifeEvent& SchedulerCore::record(const RequestState& request, LifeKind kind, Cause cause) {
  return recorder_.add(request.record, kind, now_, LifeEvent::because(cause));
}

void SchedulerCore::record_arrival(RequestState& request, const Coverage& coverage, const NewRequest& from) {
  request.record = recorder_.begin(request.id.value, from.trace);
  LifeEvent& event = recorder_.add(request.record, LifeKind::kArrived, now_, {.duration = from.waited});
  event.tokens = request.chain.size();
  event.local = coverage.tokens;
  if (const auto keys = request.chain.hashed_keys(); !keys.empty()) event.prefix = keys[0].hex().substr(0, 8);
  if (!request.cacheable) note_cause(request, Cause::kNotShared);
  if (!request.source) return;
  event.expected = request.known_tokens = request.source->num_tokens;
  if (request.source->endpoint.empty()) {
    blame(request, Cause::kHandoffUnusable, {}, request.source->handoff);
    request.source.reset();
    return;
  }
  event.peer = request.source->endpoint;
  // `handoff` is the request's id on the prefill node, a '.' and a secret, which is not recorded.
  event.note = std::string_view(request.source->handoff).substr(0, request.source->handoff.rfind('.'));
}

/// Makes the event that was recorded last the reason why the next admission lacks KV, unless an earlier failure is the
/// reason already: later failures come from attempts to get the KV in another way. Any failure replaces kNoHolder.
void SchedulerCore::note_cause(RequestState& request, Cause cause) {
  if (request.cause != Cause::kNone && request.cause != Cause::kNoHolder) return;
  request.cause = cause;
  request.cause_event = recorder_.last();
}

/// Records that KV did not come from `peer`, or from any node if `peer` is empty. Each cause is recorded at most once
/// before each admission, since a request may try without end.
void SchedulerCore::blame(RequestState& request, Cause cause, std::string_view peer, std::string_view note) {
  const std::uint32_t bit = std::uint32_t{1} << static_cast<std::uint32_t>(cause);
  // A failure says more than the fact that no other node helped.
  if ((request.causes_seen & bit) != 0 || (cause == Cause::kNoHolder && request.cause != Cause::kNone)) return;
  request.causes_seen |= bit;
  LifeEvent& event = record(request, LifeKind::kFetchFailed, cause);
  event.peer = peer;
  event.note = note;
  note_cause(request, cause);
}

/// Records what the request has waited for too long.
void SchedulerCore::blame_wait(RequestState& request) {
  if (!request.fetch) return blame(request, Cause::kNotInTime, request.source ? request.source->endpoint : "");
  switch (request.fetch->stage) {
    case Fetch::Stage::kDirectory:
      return blame(request, Cause::kControllerLate);
    case Fetch::Stage::kLease:
      return blame(request, Cause::kNoAnswer, request.fetch->endpoint);
    case Fetch::Stage::kPull:
      return blame(request, Cause::kTooSlow, request.fetch->endpoint);
  }
}

void SchedulerCore::record_wait(RequestState& request) {
  if (request.wait != RequestState::Wait::kNew) return;
  request.wait = RequestState::Wait::kPending;
  record(request, LifeKind::kWaits);
}

void SchedulerCore::record_answer(RequestState& request, const OpenLookup& open) {
  if (request.wait != RequestState::Wait::kPending) return;
  request.wait = RequestState::Wait::kAnswered;
  LifeEvent& event = record(request, LifeKind::kAnswered);
  event.local = open.num_local;
  event.loaded = open.num_external;
}

/// Returns why a request with `num_here` tokens in blocks after its admission has to compute more than its last token.
Cause SchedulerCore::cause_of_rest(const RequestState& request, std::uint32_t num_here) const {
  const std::uint32_t rest = request.chain.size() - 1 - std::min(num_here, request.chain.size() - 1);
  if (rest == 0) return Cause::kNone;
  if (!request.cacheable) return request.cause == Cause::kNone ? Cause::kNotShared : request.cause;
  if (request.is_recomputed()) return Cause::kNoBlocks;
  if (!request.open_lookup) return Cause::kNotAsked;
  if (request.open_lookup->hit > num_here) return Cause::kWindow;
  if (request.cause != Cause::kNone && request.cause != Cause::kNoHolder) return request.cause;
  if (request.kept_tokens > num_here)
    return request.pool_was_full ? Cause::kPoolFull : has_windows_ ? Cause::kWindow : Cause::kEvicted;
  return num_here > 0 && rest < config_.chunk_tokens ? Cause::kTooShort : Cause::kNoHolder;
}

void SchedulerCore::record_admission(RequestState& request, std::uint32_t num_local, std::uint32_t num_external) {
  const Cause cause = cause_of_rest(request, num_local + num_external);
  const LifeEvent* const source = cause == request.cause ? recorder_.event(request.cause_event) : nullptr;
  const LifeEvent why = source != nullptr ? *source : LifeEvent{};
  LifeEvent& event = record(request, LifeKind::kAdmitted, cause);
  event.tokens = request.chain.size();
  event.local = num_local;
  event.loaded = num_external;
  event.expected = request.known_tokens;
  if (why.what() != LifeKind::kArrived) {
    event.peer = why.peer;
    event.note = why.note;
  }
  counters_.recomputed_tokens[event.cause] += recomputed_tokens(event);
  if (num_external > 0 && loads_async()) record(request, LifeKind::kLoadBegan);
  request.computes_until = request.chain.size();
  request.wait = RequestState::Wait::kNew;
  request.causes_seen = 0;
  if (request.cacheable) request.cause = Cause::kNone;
}

/// Records a preemption. The saves of the request's last chunks are planned already.
void SchedulerCore::record_preemption(RequestState& request) {
  request.kept_tokens = std::max(request.saved, request.last_tail_end);
  request.known_tokens = std::max(request.known_tokens, request.computed);
  request.computes_until = 0;
  record(request, LifeKind::kPreempted).tokens = request.computed;
}

void SchedulerCore::record_load(RequestState* request, const PendingLoad& load) {
  const Admission& admission = load.admission;
  const bool is_complete = admission.loaded == admission.to_load;
  const Cause cause = is_complete ? Cause::kNone : load.found_corrupt ? Cause::kDamaged : Cause::kLoadFailed;
  LifeEvent& event = recorder_.add(load.record, LifeKind::kLoaded, now_, LifeEvent::because(cause));
  event.expected = admission.to_load;
  event.loaded = admission.loaded;
  const std::uint32_t end = admission.local + admission.loaded;
  if (admission.loaded > 0)
    event.chunks = (end - 1) / config_.chunk_tokens - admission.local / config_.chunk_tokens + 1;
  event.bytes = config_.bytes_of(admission.loaded);
  event.duration = now_ - load.began;
  if (load.is_prepared) return;  // the engine does not compute the tokens of a preparation whose load failed
  counters_.recomputed_tokens[event.cause] += recomputed_tokens(event);
  // A failed asynchronous load explains what the next admission lacks. After a failed synchronous load the request
  // keeps running, and the engine computes the missing tokens.
  if (request != nullptr && !is_complete && loads_async()) note_cause(*request, cause);
}

/// Adds a rank's outcome to the pull's event. After the last rank, records the event, as one of no request if the pull
/// serves an announced push, but not if it serves a replication.
void SchedulerCore::record_pull(FetchPull& pull, const std::vector<bool>& ok, const TransferEnd& end) {
  LifeEvent& sum = pull.event;
  const auto num_failed = static_cast<std::uint32_t>(std::ranges::count(ok, false));
  pull.lost.resize(ok.size());
  for (std::size_t i = 0; i < ok.size(); ++i) pull.lost[i] = pull.lost[i] || !ok[i];
  sum.failed = static_cast<std::uint32_t>(std::ranges::count(pull.lost, true));
  if (!end.path.empty()) sum.path = end.path;
  sum.limit_mb_per_s += end.limit_mb_per_s;
  sum.post = end.post;
  sum.wire = end.wire;
  sum.unpack = end.unpack;
  counters_.pulled_in_frames += end.num_in_frames;
  counters_.pulled_past_frames += end.num_past_frames;
  sum.in_frames = std::max(sum.in_frames, end.num_in_frames);
  if (end.num_past_frames > 0) frame_holders_.missed(pull.endpoint);
  pull.ranks_in_frames += end.num_in_frames > 0 && end.num_past_frames == 0 ? 1 : 0;
  if (pull.ranks_in_frames == config_.num_ranks) frame_holders_.reached(pull.endpoint);
  if (sum.failed == 0 && !end.host_why.empty()) sum.note = end.host_why;
  if (num_failed > 0) {
    sum.cause = static_cast<std::uint8_t>(cause_of(end.code));
    sum.note = end.what;
  }
  if (pull.ranks_done < config_.num_ranks || (pull.request.value.empty() && !pull.is_announced)) return;
  std::uint64_t num_tokens = 0;
  for (std::size_t i = 0; i < ok.size(); ++i) num_tokens += pull.lost[i] ? 0 : pull.items[i].num_tokens;
  sum.tokens = static_cast<std::uint32_t>(num_tokens);
  sum.bytes = config_.bytes_of(num_tokens);
  sum.chunks = static_cast<std::uint32_t>(ok.size()) - sum.failed;
  sum.duration = now_ - pull.started_at;
  sum.peer = pull.endpoint;
  recorder_.add(pull.record, LifeKind::kPulled, now_, sum);
  RequestState* request = find(pull.request);
  if (request != nullptr && sum.failed > 0) note_cause(*request, sum.why());
}

}  // namespace kvferry
