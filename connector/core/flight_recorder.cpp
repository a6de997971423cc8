#include "connector/core/flight_recorder.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "transport/base/check.h"

namespace kvferry {
namespace {

bool matches(std::string_view id, std::string_view asked) {
  for (std::size_t at = id.find(asked); at != std::string_view::npos; at = id.find(asked, at + 1)) {
    const std::size_t end = at + asked.size();
    if ((at == 0 || id[at - 1] == '-') && (end == id.size() || id[end] == '-')) return true;
  }
  return false;
}

}  // namespace

std::string text_of(Cause cause) {
  switch (cause) {
    case Cause::kNone:
      return "no cause is known";
    case Cause::kNoHolder:
      return "no node held these chunks";
    case Cause::kTooShort:
      return "the tokens at the end fill no whole chunk, and their partial chunk was not saved or not found";
    case Cause::kEvicted:
      return "this node's pool had evicted the chunks";
    case Cause::kEvictedThere:
      return "the node that was asked had evicted the chunks";
    case Cause::kNoController:
      return "the controller was not reached, so no holder was known";
    case Cause::kControllerLate:
      return "the controller did not answer in time";
    case Cause::kNoAnswer:
      return "the other node did not answer in time: it is dead or frozen, or its port is not reached";
    case Cause::kLinkLost:
      return "the connection to the other node broke during the transfer";
    case Cause::kTooSlow:
      return "the transfer did not end in time: the other node may be slow or frozen, or the network slow";
    case Cause::kNotInTime:
      return "the chunks did not arrive within load_timeout_ms";
    case Cause::kDamaged:
      return "a chunk was damaged: its bytes did not match its checksum";
    case Cause::kRefused:
      return "the other node refused to lease or to accept the chunks";
    case Cause::kFailed:
      return "the transfer failed";
    case Cause::kHandoffUnusable:
      return "the prefill node's hand-off in kv_transfer_params could not be used";
    case Cause::kSuspect:
      return "the holder was not asked, because its chunks had not arrived for another request";
    case Cause::kPoolFull:
      return "this node's pool had no free slot: all were pinned, being written or within other tenants' shares";
    case Cause::kNotShared:
      return "the request's KV is not shared: prompt embeddings, a streamed session, an adapter that changed, a load "
             "that failed before, or KV of a purged node";
    case Cause::kNoBlocks:
      return "the engine had no free blocks for a load";
    case Cause::kWindow:
      return "KV or state at the end of the hit was evicted or never kept (sliding window, model with state)";
    case Cause::kReset:
      return "this node's pool was cleared";
    case Cause::kNotAsked:
      return "the engine reads no cached KV for this request (prompt logprobs, for example)";
    case Cause::kAborted:
      return "it was aborted";
    case Cause::kLoadFailed:
      return "the load into the engine's blocks failed";
  }
  return fmt::format("unknown cause {} of a newer release", static_cast<int>(cause));
}

Cause cause_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kCorrupt:
      return Cause::kDamaged;
    case ErrorCode::kPeerLost:
      return Cause::kLinkLost;
    case ErrorCode::kCancelled:  // the deadline of a pull or push cancels its transfers
    case ErrorCode::kTimeout:
      return Cause::kTooSlow;
    case ErrorCode::kRefused:
      return Cause::kRefused;
    default:
      return Cause::kFailed;
  }
}

bool is_trace_id(std::string_view text) {
  return text.size() == 32 && text.find_first_not_of("0123456789abcdef") == text.npos &&
         text.find_first_not_of('0') != text.npos;
}

std::uint32_t recomputed_tokens(const LifeEvent& event) {
  if (event.what() == LifeKind::kLoaded) return event.expected - std::min(event.expected, event.loaded);
  if (event.what() != LifeKind::kAdmitted || event.tokens == 0) return 0;
  // The engine computes the last token in any case.
  const std::uint64_t known = std::min(event.expected, event.tokens - 1);
  return static_cast<std::uint32_t>(known - std::min(known, std::uint64_t{event.local} + event.loaded));
}

FlightRecorder::FlightRecorder(std::uint32_t num_events, std::uint32_t num_requests)
    : records_(num_events), requests_(num_requests) {
  KVFERRY_CHECK(num_events > 0 && num_requests > 0,
                "a flight recorder needs room for at least one event and one request, not for {} and {} of them",
                num_events, num_requests);
}

std::uint64_t FlightRecorder::begin(std::string_view request, std::string_view trace) {
  Request& slot = requests_[++num_requests_ % requests_.size()];
  slot = Request{num_requests_};
  slot.id = request;
  if (is_trace_id(trace)) slot.trace = trace;
  return num_requests_;
}

LifeEvent& FlightRecorder::add(std::uint64_t request, LifeKind kind, TimeNs now, const LifeEvent& event) {
  Record& record = records_[++num_events_ % records_.size()];
  record.event = event;
  record.event.kind = static_cast<std::uint8_t>(kind);
  record.event.at = now;
  record.request = request;
  record.previous = 0;
  if (Request& slot = requests_[request % requests_.size()]; request != 0 && slot.number == request) {
    record.previous = std::exchange(slot.last, num_events_);
    if (record.previous == 0) slot.began = now - (kind == LifeKind::kArrived ? event.duration : 0);
    if (kind == LifeKind::kFinished) slot.ended = now;
  }
  return record.event;
}

const LifeEvent* FlightRecorder::event(std::uint64_t number) const {
  const bool is_there = number > 0 && number <= num_events_ && number + records_.size() > num_events_;
  return is_there ? &records_[number % records_.size()].event : nullptr;
}

std::vector<RequestLife> FlightRecorder::find(std::string_view id, TimeNs now) const {
  return newest_where([id](const Request& one) { return !id.empty() && matches(one.id.view(), id); }, now);
}

std::vector<RequestLife> FlightRecorder::find_trace(std::string_view trace, TimeNs now) const {
  return newest_where([trace](const Request& one) { return !trace.empty() && one.trace.view() == trace; }, now);
}

/// Returns the lives of the newest requests that meet the condition, at most kLivesMax, the oldest life first.
template <class Condition>
std::vector<RequestLife> FlightRecorder::newest_where(Condition is_asked, TimeNs now) const {
  std::vector<RequestLife> lives;
  for (std::uint64_t number = num_requests_; number > 0 && number + requests_.size() > num_requests_; --number) {
    const Request& request = requests_[number % requests_.size()];
    if (!is_asked(request)) continue;
    lives.push_back(life_of(request, now));
    if (lives.size() == kLivesMax) break;
  }
  std::reverse(lives.begin(), lives.end());
  return lives;
}

std::vector<RequestLife> FlightRecorder::newest(std::size_t num, TimeNs now) const {
  std::vector<RequestLife> lives;
  num = std::min({num, kLivesMax, requests_.size()});
  for (std::uint64_t number = num_requests_; number > 0 && lives.size() < num; --number)
    lives.push_back(life_of(requests_[number % requests_.size()], now));
  return lives;
}

std::vector<RequestLife> FlightRecorder::slowest(std::size_t num, TimeNs now) const {
  std::vector<std::pair<TimeNs, const Request*>> by_time;
  for (const Request& request : requests_)
    if (request.last != 0) by_time.emplace_back((request.ended != 0 ? request.ended : now) - request.began, &request);
  const auto end = by_time.begin() + static_cast<std::ptrdiff_t>(std::min({num, kLivesMax, by_time.size()}));
  std::partial_sort(by_time.begin(), end, by_time.end(), std::greater<>());
  std::vector<RequestLife> lives;
  for (auto one = by_time.begin(); one != end; ++one) lives.push_back(life_of(*one->second, now));
  return lives;
}

std::vector<RequestLife> FlightRecorder::transfers_after(std::uint64_t number, TimeNs now) const {
  std::vector<RequestLife> ended;
  for (number = std::max(number + 1, oldest()); number <= num_events_; ++number) {
    const Record& record = records_[number % records_.size()];
    const LifeKind kind = record.event.what();
    if (kind != LifeKind::kLoaded && kind != LifeKind::kPulled && kind != LifeKind::kPushed) continue;
    const Request& request = requests_[record.request % requests_.size()];
    const bool is_known = request.number == record.request;
    ended.push_back({std::string(is_known ? request.id.view() : ""), /*is_cut=*/true, {record.event}});
    ended.back().events[0].at = now - record.event.at;
  }
  return ended;
}

RequestLife FlightRecorder::life_of(const Request& request, TimeNs now) const {
  RequestLife life{std::string(request.id.view()), false, {}, std::string(request.trace.view())};
  for (std::uint64_t number = request.last; number != 0;) {
    const LifeEvent* found = event(number);
    life.is_cut = found == nullptr || life.events.size() == kEventsMax;
    if (life.is_cut) break;
    life.events.push_back(*found);
    life.events.back().at = now - found->at;
    number = records_[number % records_.size()].previous;
  }
  std::reverse(life.events.begin(), life.events.end());
  return life;
}

}  // namespace kvferry
