#include "controller/engines/engine_stream.h"

#include <xxhash.h>

#include <algorithm>
#include <utility>

namespace kvferry::controller {
namespace {

/// Above every number that an engine reaches: it has nothing to send but the end.
constexpr std::uint64_t kNothing = (std::uint64_t{1} << 63) - 1;

}  // namespace

EngineStream::EngineStream(const EngineStreamOptions& options, EngineStreamSink& sink, TimeNs now)
    : options_(options), sink_(sink), last_heard_(now), disconnected_at_(now), last_tick_(now) {}

void EngineStream::connected(TimeNs now) {
  is_connected_ = true;
  last_heard_ = now;
  last_heard_sequence_.reset();
  last_replayed_sequence_.reset();
  held_.clear();  // of the former connection, perhaps of another engine; of the same one the replay brings it again
  held_bytes_ = 0;
  if (is_live_ && options_.has_replay && holds_anything_) {
    is_live_ = false;  // until it has shown that it is the same one
    lost_at_ = now;
  }
  if (options_.has_replay) repair(now);
}

void EngineStream::disconnected(TimeNs now) {
  if (is_connected_) disconnected_at_ = now;
  is_connected_ = false;
}

void EngineStream::alive(TimeNs now) {
  last_heard_ = now;
  if (is_live_) return;
  // What it held was kept, but is credited again only if it is still the same one.
  if (!options_.has_replay || !holds_anything_)
    is_live_ = true;
  else if (!waits())
    repair(now);
}

void EngineStream::heard(std::uint64_t sequence, std::string_view payload, TimeNs now) {
  alive(now);
  const bool went_backwards = last_heard_sequence_ && sequence <= *last_heard_sequence_;
  // What a replay was faster with comes once more.
  const bool is_known = next_ && sequence < *next_;
  const bool is_duplicate = is_known && last_replayed_sequence_ && sequence <= *last_replayed_sequence_;
  if (went_backwards || (is_known && !is_duplicate)) restart(now);
  last_heard_sequence_ = sequence;
  take(sequence, payload, now);
}

/// A batch that is not older than what was heard before.
void EngineStream::take(std::uint64_t sequence, std::string_view payload, TimeNs now) {
  if (next_ && sequence < *next_) {
    ++counters_.duplicates;
    return;
  }
  if (sequence == next_ && replay_ != Replay::kVerify) return apply(sequence, payload);
  if (waits()) return hold(sequence, payload, now);
  if (!next_) {
    if (sequence != 0 && options_.has_replay && replay_ != Replay::kLater) {
      ask(Replay::kFromStart, now);
      return hold(sequence, payload, now);
    }
    return apply(sequence, payload);
  }
  ++counters_.gaps;
  if (options_.has_replay && replay_ != Replay::kLater) {
    repair(now);
    return hold(sequence, payload, now);
  }
  ++counters_.gaps_unrepaired;
  drop_everything();
  apply(sequence, payload);
}

void EngineStream::apply(std::uint64_t sequence, std::string_view payload) {
  sink_.apply(payload);
  ++counters_.batches;
  next_ = sequence + 1;
  last_applied_hash_ = XXH3_64bits(payload.data(), payload.size());
  holds_anything_ = true;
}

void EngineStream::drop_everything() {
  if (holds_anything_) sink_.drop_everything();
  holds_anything_ = false;
  next_.reset();
}

/// Not a trace of the old engine is left: what waits here may be its as well.
void EngineStream::restart(TimeNs now) {
  ++counters_.restarts;
  drop_everything();
  held_.clear();
  held_bytes_ = 0;
  last_replayed_sequence_.reset();
  is_live_ = true;
  replay_ = Replay::kNone;
  if (options_.has_replay) ask(Replay::kFromStart, now);
}

void EngineStream::ask(Replay replay, TimeNs now) {
  replay_ = replay;
  has_answered_ = false;
  replay_progress_at_ = now;
  wish_ = replay == Replay::kProbe ? kNothing : replay == Replay::kVerify ? *next_ - 1 : 0;
  ++counters_.replays;
}

void EngineStream::repair(TimeNs now) {
  num_tries_ = 0;
  ask(holds_anything_ && next_ ? Replay::kVerify : Replay::kFromStart, now);
}

std::optional<std::uint64_t> EngineStream::take_replay_wish() { return std::exchange(wish_, std::nullopt); }

void EngineStream::hold(std::uint64_t sequence, std::string_view payload, TimeNs now) {
  held_.push_back({sequence, std::string(payload)});
  held_bytes_ += payload.size();
  if (held_bytes_ > options_.held_bytes_max) go_on_without_replay(now);
}

void EngineStream::replayed(std::uint64_t sequence, std::string_view payload, TimeNs now) {
  has_ever_replayed_ = true;
  alive(now);
  if (replay_ == Replay::kNone || replay_ == Replay::kProbe || wish_) return;  // of a request that is no longer wanted
  replay_progress_at_ = now;
  const bool is_first = !has_answered_;
  has_answered_ = true;
  if (is_first && replay_ == Replay::kVerify) {
    if (sequence + 1 == *next_) {
      is_live_ = true;
      if (XXH3_64bits(payload.data(), payload.size()) != last_applied_hash_) restart(now);
      return;
    }
    // It doesn't reach back that far, so nobody can tell what was missed, or whose it was.
    ++counters_.gaps_unrepaired;
    drop_everything();
    return ask(Replay::kFromStart, now);
  }
  if (is_first && replay_ != Replay::kVerify) {
    replay_ = Replay::kFromStart;
    is_live_ = true;
    drop_everything();
  }
  last_replayed_sequence_ = std::max(last_replayed_sequence_.value_or(0), sequence);
  if (next_ && sequence < *next_) {
    ++counters_.duplicates;
    return;
  }
  // ZeroMQ drops what a long replay sends faster than it can be taken. The rest is asked for again.
  if (next_ && sequence > *next_) return ask(Replay::kVerify, now);
  num_tries_ = 0;
  apply(sequence, payload);
}

void EngineStream::replay_ended(TimeNs now) {
  has_ever_replayed_ = true;
  alive(now);
  if (replay_ == Replay::kNone || wish_) return;
  const Replay ended = std::exchange(replay_, Replay::kNone);
  num_tries_ = 0;
  if (ended == Replay::kProbe) return;
  if (ended == Replay::kVerify && !has_answered_) return restart(now);  // it has not got that far yet: it is young
  if (ended == Replay::kLater || (!has_answered_ && !next_)) {
    // It has nothing to tell of yet.
    drop_everything();
    if (held_.empty()) next_ = 0;
  }
  apply_held(now);
}

void EngineStream::apply_held(TimeNs now) {
  std::deque<Held> held;
  held.swap(held_);
  held_bytes_ = 0;
  for (const Held& batch : held) take(batch.sequence, batch.payload, now);
}

/// Its replay endpoint is silent or can't keep up. What is missing stays so; what comes is applied.
void EngineStream::go_on_without_replay(TimeNs now) {
  if (replay_ == Replay::kVerify || !held_.empty()) {
    if (holds_anything_ && (replay_ == Replay::kVerify)) ++counters_.gaps_unrepaired;
    drop_everything();
  }
  is_live_ = true;
  replay_ = Replay::kLater;
  retry_after_ = std::min(options_.retry_max, options_.retry_first << std::min(num_tries_, 10U));
  replay_progress_at_ = now;
  apply_held(now);
}

void EngineStream::lose(TimeNs now) {
  ++counters_.losses;
  is_live_ = false;
  lost_at_ = now;
}

void EngineStream::tick(TimeNs now) {
  if (const TimeNs late = now - last_tick_; late > options_.lease / 2) {
    // Nobody listened meanwhile, so nobody knows who was silent.
    last_heard_ += late;
    disconnected_at_ += late;
    replay_progress_at_ += late;
  }
  last_tick_ = now;
  if (!is_live_) {
    if (holds_anything_ && now - lost_at_ > options_.forget_after) drop_everything();
  } else if (holds_anything_ && !is_connected_ && now - disconnected_at_ > options_.lease) {
    lose(now);
  } else if (holds_anything_ && has_ever_replayed_ && now - last_heard_ > options_.lease) {
    lose(now);
  }
  if (!options_.has_replay || !is_connected_) return;

  const TimeNs waited = now - replay_progress_at_;
  if (waits()) {
    if (waited <= options_.replay_patience) return;
    if (++num_tries_ >= options_.replay_tries) return go_on_without_replay(now);
    if (has_answered_) {  // broken off: from where it stopped
      ask(holds_anything_ && next_ ? Replay::kVerify : Replay::kFromStart, now);
    } else {
      ask(replay_, now);
    }
  } else if (replay_ == Replay::kLater) {
    if (waited <= retry_after_) return;
    ++num_tries_;
    retry_after_ = std::min(options_.retry_max, options_.retry_first << std::min(num_tries_, 10U));
    ask(Replay::kLater, now);
  } else if (now - last_heard_ > options_.probe_after && (replay_ == Replay::kNone || waited > options_.probe_after)) {
    ask(Replay::kProbe, now);
  }
}

}  // namespace kvferry::controller
