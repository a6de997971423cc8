// The flight recorder of a scheduler node: a ring of the latest events in requests' lives, which `kvferry explain`
// shows. Its memory is allocated once; recording an event writes one record. The class has no I/O and no clock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "connector/core/short_text.h"
#include "transport/base/clock.h"
#include "transport/base/result.h"
#include "transport/base/wire.h"

namespace kvferry {

/// What happened. The comment of each kind names the fields of LifeEvent that it sets, except those whose own comment
/// names the kind. The numbers are sent between nodes, so new kinds are added at the end.
enum class LifeKind : std::uint8_t {
  // The request arrived. Fields: duration (since the server got it), tokens (of the prompt), local (tokens in this
  // node's pool), peer (the handoff source), expected (tokens handed over), note (the request's id at `peer`).
  kArrived,
  kWaits,        // a lookup stays pending, for the first time since the request's arrival or last admission
  kAnswered,     // the first answer after kWaits. Fields: local (tokens in the engine's cache), loaded (tokens to load)
  kAdmitted,     // admitted by the engine. Fields: tokens, local, loaded, expected (computed before), cause, peer, note
  kLoadBegan,    // an asynchronous load began: the request runs only after it
  kLoaded,       // a load ended. Fields: expected (tokens to load), loaded, chunks, bytes, duration, cause
  kComputed,     // the engine has computed every token that was known at the admission
  kPreempted,    // the engine preempted the request. Field: tokens (computed so far)
  kFinished,     // the request ended. Fields: tokens, expected (kept for a decode node), cause if aborted
  kPulled,       // a fetch's pull ended. Fields: peer, path, tokens, chunks, failed, bytes, all times, cause, note
  kFetchFailed,  // KV did not come from other nodes. Fields: peer (empty: no node is to blame), cause, note
  kPushOffered,  // chunks were offered to `peer`. Field: chunks
  kPushed,       // a push ended. Fields: peer, path, tokens, chunks, failed, bytes, duration, wire, cause, note
};

/// Why KV was not loaded or sent, or why a request ended. Nodes exchange the numbers, so new causes go to the end.
enum class Cause : std::uint8_t {
  kNone,
  kNoHolder,
  kTooShort,
  kEvicted,
  kEvictedThere,
  kNoController,
  kControllerLate,
  kNoAnswer,
  kLinkLost,
  kTooSlow,
  kNotInTime,
  kDamaged,
  kRefused,
  kFailed,
  kHandoffUnusable,
  kSuspect,
  kPoolFull,
  kNotShared,
  kNoBlocks,
  kWindow,
  kReset,
  kNotAsked,
  kAborted,
  kLoadFailed,
};

/// [Cause] The cause's name, which metrics have as a label.
inline constexpr std::string_view kCauseNames[] = {
    "unknown",          "no_holder", "too_short",  "evicted",     "evicted_there", "no_controller", "controller_late",
    "no_answer",        "link_lost", "too_slow",   "not_in_time", "damaged",       "refused",       "failed",
    "handoff_unusable", "suspect",   "pool_full",  "not_shared",  "no_blocks",     "window",        "reset",
    "not_asked",        "aborted",   "load_failed"};
inline constexpr std::size_t kNumCauses = std::size(kCauseNames);
static_assert(kNumCauses == static_cast<std::size_t>(Cause::kLoadFailed) + 1);

/// Returns the cause as a part of a sentence; "unknown cause N of a newer release" for an unknown number.
std::string text_of(Cause cause);
/// Returns the cause of a transfer that failed with this code; kFailed for codes without a cause of their own.
Cause cause_of(ErrorCode code);

struct LifeEvent {
  std::uint8_t kind = 0;   // LifeKind
  std::uint8_t cause = 0;  // Cause
  TimeNs at = 0;           // time of the event; in a RequestLife: time from the event to the query for the life
  TimeNs duration = 0;
  std::uint64_t bytes = 0;
  std::uint32_t tokens = 0, local = 0, loaded = 0, expected = 0;
  std::uint32_t chunks = 0, failed = 0;
  // With kPulled and kPushed: the limit of `path` to `peer` for all ranks together, in 10^6 bytes per second: the rate
  // that the transport measured, or that of the fastest transfer if one was faster; 0: not measured yet.
  std::uint32_t limit_mb_per_s = 0;
  ShortText<8> path{};
  ShortText<55> peer{};
  ShortText<103> note{};  // why KV did not come, was not sent or bypassed GPU frames; or as kArrived says
  ShortText<8> prefix{};  // first digits of the first chunk's key (kArrived)
  // Parts of the duration of a pull, of the rank that ended last: until its last transfer was submitted, from then
  // until the last byte, from then until all chunks were in their slots, or verified in frames. With kPushed `wire` is
  // the part after the last chunk was complete in this node's pool and its push had been ordered.
  TimeNs post = 0, wire = 0, unpack = 0;
  std::uint32_t in_frames = 0;  // with kPulled: the most chunks that one rank pulled from GPU memory to GPU memory
  KVFERRY_FIELDS(kind, cause, at, duration, bytes, tokens, local, loaded, expected, chunks, failed, path, peer, note,
                 limit_mb_per_s, prefix, post, wire, unpack, in_frames);

  static LifeEvent because(Cause cause) { return {.cause = static_cast<std::uint8_t>(cause)}; }
  LifeKind what() const { return static_cast<LifeKind>(kind); }
  Cause why() const { return static_cast<Cause>(cause); }
};

/// Longest `duration` of kArrived. A longer time counts as unknown: the wall clock was probably set meanwhile.
constexpr TimeNs kWaitMax = 3600 * kSecond;

/// Returns true if the text is a W3C trace id: 32 hexadecimal digits, lower case, not all of them zero.
bool is_trace_id(std::string_view text);

/// Returns the number of tokens that the engine computes again after this event, although their KV existed before.
std::uint32_t recomputed_tokens(const LifeEvent& event);

/// The recorded events of one request on one node, oldest first.
struct RequestLife {
  std::string request;  // vLLM's id of the request on this node
  bool is_cut = false;  // true if earlier events were overwritten or left out
  std::vector<LifeEvent> events;
  std::string trace{};  // the request's W3C trace id; empty: it has none
  KVFERRY_FIELDS(request, is_cut, events, trace);
};

class FlightRecorder {
 public:
  static constexpr std::size_t kLivesMax = 16, kEventsMax = 256;  // limits on the lives found, and on a life's events

  FlightRecorder(std::uint32_t num_events, std::uint32_t num_requests);

  /// Begins a request's life. Returns the request's number, for add(). A `trace` that is no trace id is dropped.
  std::uint64_t begin(std::string_view request, std::string_view trace = {});
  /// Records `event` with this kind and time, in place of the oldest event if the ring is full. The reference is valid
  /// until the next add(). find() doesn't return events of a request after `num_requests` later requests have begun.
  LifeEvent& add(std::uint64_t request, LifeKind kind, TimeNs now, const LifeEvent& event = {});
  /// Returns the number of the event that was added last.
  std::uint64_t last() const { return num_events_; }
  /// Returns the number of the oldest event that was not overwritten.
  std::uint64_t oldest() const { return num_events_ - std::min<std::uint64_t>(num_events_, records_.size()) + 1; }
  /// Returns event `number`, nullptr if it was overwritten or never recorded.
  const LifeEvent* event(std::uint64_t number) const;
  /// Returns the newest lives of requests whose id is `id`, or contains `id` as a part that hyphens separate from the
  /// rest: vLLM adds a prefix and a suffix to the client's id. An empty `id` finds nothing.
  std::vector<RequestLife> find(std::string_view id, TimeNs now) const;
  std::vector<RequestLife> find_trace(std::string_view trace, TimeNs now) const;
  /// newest() and slowest() return at most min(`num`, kLivesMax) lives, of the newest or the slowest requests.
  std::vector<RequestLife> newest(std::size_t num, TimeNs now) const;
  std::vector<RequestLife> slowest(std::size_t num, TimeNs now) const;
  /// Returns the loads, pulls and pushes whose end was recorded after event `number` and not overwritten since, each as
  /// a RequestLife of one event. Its `request` is empty if the request's record was overwritten.
  std::vector<RequestLife> transfers_after(std::uint64_t number, TimeNs now) const;

 private:
  struct Record {
    std::uint64_t request = 0;
    std::uint64_t previous = 0;  // number of the request's previous event; 0: none
    LifeEvent event;
  };
  struct Request {
    std::uint64_t number = 0;
    std::uint64_t last = 0;       // number of the request's last event; 0: none
    TimeNs began = 0, ended = 0;  // times of arrival (or else of the first event) and of kFinished; 0: not yet
    ShortText<127> id{};
    ShortText<32> trace{};
  };
  template <class Condition>
  std::vector<RequestLife> newest_where(Condition is_asked, TimeNs now) const;
  RequestLife life_of(const Request& request, TimeNs now) const;

  std::vector<Record> records_;  // ring of the events: event number n is at index n % size
  std::vector<Request> requests_;
  std::uint64_t num_events_ = 0, num_requests_ = 0;  // events and requests are numbered from 1
};

}  // namespace kvferry
