#include "controller/engines/engine_stream.h"

#include <xxhash.h>

#include <algorithm>
#include <utility>

namespace kvferry::controller {
namespace {

/// First sequence number of a replay that only checks that the engine is alive: no batch has a number this high.
constexpr std::uint64_t kProbeSequence = (std::uint64_t{1} << 63) - 1;

}  // namespace

EngineStream::EngineStream(const EngineStreamOptions& options, EngineStreamSink& sink, TimeNs now)
    : options_(options), sink_(sink), last_received_at_(now), disconnected_at_(now), last_tick_(now) {}

void EngineStream::connected(TimeNs now) {
  is_connected_ = true;
  last_received_at_ = now;
  last_received_sequence_.reset();
  last_replayed_sequence_.reset();
  waiting_.clear();  // waiting batches may be from before a restart; the replay repeats those that are still valid
  waiting_bytes_ = 0;
  if (is_live_ && options_.has_replay && has_applied_) {
    is_live_ = false;  // the engine counts as lost until a replay is answered or given up
    lost_at_ = now;
  }
  if (options_.has_replay) repair(now);
}

void EngineStream::disconnected(TimeNs now) {
  if (is_connected_) disconnected_at_ = now;
  is_connected_ = false;
}

void EngineStream::note_alive(TimeNs now) {
  last_received_at_ = now;
  if (is_live_) return;
  // With a replay endpoint, the engine's blocks count again only after a replay shows that it is the same engine.
  if (!options_.has_replay || !has_applied_)
    is_live_ = true;
  else if (!is_replaying())
    repair(now);
}

void EngineStream::received(std::uint64_t sequence, std::string_view payload, TimeNs now) {
  note_alive(now);
  const bool is_backwards = last_received_sequence_ && sequence <= *last_received_sequence_;
  // A replay may have delivered this batch before the subscription did. Such a duplicate does not show a restart.
  const bool is_known = next_ && sequence < *next_;
  const bool is_duplicate = is_known && last_replayed_sequence_ && sequence <= *last_replayed_sequence_;
  if (is_backwards || (is_known && !is_duplicate)) restart(now);
  last_received_sequence_ = sequence;
  take_in_order(sequence, payload, now);
}

/// Drops a duplicate, and applies the next batch. While a replay is running, queues any other batch; during kVerify,
/// the next batch is queued too. While no replay is running, batch 0 is applied if next_ is unknown. In the remaining
/// cases earlier batches are missing: requests a replay and queues the batch, or, if no replay is possible now, drops
/// all blocks and applies the batch.
void EngineStream::take_in_order(std::uint64_t sequence, std::string_view payload, TimeNs now) {
  if (next_ && sequence < *next_) {
    ++counters_.duplicates;
    return;
  }
  if (sequence == next_ && replay_ != Replay::kVerify) return apply(sequence, payload);
  if (is_replaying()) return enqueue(sequence, payload, now);
  if (!next_) {
    if (sequence != 0 && options_.has_replay && replay_ != Replay::kLater) {
      request(Replay::kFromStart, now);
      return enqueue(sequence, payload, now);
    }
    return apply(sequence, payload);
  }
  ++counters_.gaps;
  if (options_.has_replay && replay_ != Replay::kLater) {
    repair(now);
    return enqueue(sequence, payload, now);
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
  has_applied_ = true;
}

void EngineStream::drop_everything() {
  if (has_applied_) sink_.drop_everything();
  has_applied_ = false;
  next_.reset();
}

/// Drops everything, including waiting batches, because these may also be from before the engine's restart.
void EngineStream::restart(TimeNs now) {
  ++counters_.restarts;
  drop_everything();
  waiting_.clear();
  waiting_bytes_ = 0;
  last_replayed_sequence_.reset();
  is_live_ = true;
  replay_ = Replay::kNone;
  if (options_.has_replay) request(Replay::kFromStart, now);
}

void EngineStream::request(Replay replay, TimeNs now) {
  replay_ = replay;
  has_answered_ = false;
  replay_progress_at_ = now;
  replay_request_ = replay == Replay::kProbe ? kProbeSequence : replay == Replay::kVerify ? *next_ - 1 : 0;
  ++counters_.replays;
}

void EngineStream::repair(TimeNs now) {
  num_tries_ = 0;
  request(has_applied_ && next_ ? Replay::kVerify : Replay::kFromStart, now);
}

std::optional<std::uint64_t> EngineStream::take_replay_request() {
  return std::exchange(replay_request_, std::nullopt);
}

void EngineStream::enqueue(std::uint64_t sequence, std::string_view payload, TimeNs now) {
  waiting_.push_back({sequence, std::string(payload)});
  waiting_bytes_ += payload.size();
  if (waiting_bytes_ > options_.waiting_bytes_max) continue_without_replay(now);
}

void EngineStream::replayed(std::uint64_t sequence, std::string_view payload, TimeNs now) {
  has_ever_replayed_ = true;
  note_alive(now);
  // The answer to an outdated request is ignored.
  if (replay_ == Replay::kNone || replay_ == Replay::kProbe || replay_request_) return;
  replay_progress_at_ = now;
  const bool is_first = !has_answered_;
  has_answered_ = true;
  if (is_first && replay_ == Replay::kVerify) {
    if (sequence + 1 == *next_) {
      is_live_ = true;
      if (XXH3_64bits(payload.data(), payload.size()) != last_applied_hash_) restart(now);
      return;
    }
    // The replay begins after the last applied batch, so it doesn't show whether the engine is the same.
    ++counters_.gaps_unrepaired;
    drop_everything();
    return request(Replay::kFromStart, now);
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
  // ZeroMQ drops batches of a long replay that arrive faster than they are read. The missing ones are requested again.
  if (next_ && sequence > *next_) return request(Replay::kVerify, now);
  num_tries_ = 0;
  apply(sequence, payload);
}

void EngineStream::replay_ended(TimeNs now) {
  has_ever_replayed_ = true;
  note_alive(now);
  if (replay_ == Replay::kNone || replay_request_) return;
  const Replay ended = std::exchange(replay_, Replay::kNone);
  num_tries_ = 0;
  if (ended == Replay::kProbe) return;
  // The replay was empty, so the engine has restarted and has published fewer batches since then than before.
  if (ended == Replay::kVerify && !has_answered_) return restart(now);
  if (ended == Replay::kLater || (!has_answered_ && !next_)) {
    // The replay was empty, so the engine had published nothing since its start when it answered.
    drop_everything();
    if (waiting_.empty()) next_ = 0;
  }
  apply_waiting(now);
}

void EngineStream::apply_waiting(TimeNs now) {
  std::deque<Waiting> waiting;
  waiting.swap(waiting_);
  waiting_bytes_ = 0;
  for (const Waiting& batch : waiting) take_in_order(batch.sequence, batch.payload, now);
}

/// Gives up the missing batches and applies those in waiting_, because the replay endpoint is silent or too slow.
void EngineStream::continue_without_replay(TimeNs now) {
  if (replay_ == Replay::kVerify || !waiting_.empty()) {
    if (has_applied_) ++counters_.gaps_unrepaired;
    drop_everything();
  }
  is_live_ = true;
  replay_ = Replay::kLater;
  retry_after_ = std::min(options_.retry_max, options_.retry_first << std::min(num_tries_, 10U));
  replay_progress_at_ = now;
  apply_waiting(now);
}

void EngineStream::lose(TimeNs now) {
  ++counters_.losses;
  is_live_ = false;
  lost_at_ = now;
}

void EngineStream::tick(TimeNs now) {
  if (const TimeNs late = now - last_tick_; late > options_.lease / 2) {
    // This controller was late and received nothing meanwhile, so this time must not count as silence of the engine.
    last_received_at_ += late;
    disconnected_at_ += late;
    replay_progress_at_ += late;
  }
  last_tick_ = now;
  if (!is_live_) {
    if (has_applied_ && now - lost_at_ > options_.drop_after) drop_everything();
  } else if (has_applied_ && !is_connected_ && now - disconnected_at_ > options_.lease) {
    lose(now);
  } else if (has_applied_ && has_ever_replayed_ && now - last_received_at_ > options_.lease) {
    lose(now);
  }
  if (!options_.has_replay || !is_connected_) return;

  const TimeNs waited = now - replay_progress_at_;
  if (is_replaying()) {
    if (waited <= options_.replay_timeout) return;
    if (++num_tries_ >= options_.replay_tries) return continue_without_replay(now);
    if (has_answered_) {  // the replay stopped midway, so its rest is requested
      request(has_applied_ && next_ ? Replay::kVerify : Replay::kFromStart, now);
    } else {
      request(replay_, now);
    }
  } else if (replay_ == Replay::kLater) {
    if (waited <= retry_after_) return;
    ++num_tries_;
    retry_after_ = std::min(options_.retry_max, options_.retry_first << std::min(num_tries_, 10U));
    request(Replay::kLater, now);
  } else if (now - last_received_at_ > options_.probe_after &&
             (replay_ == Replay::kNone || waited > options_.probe_after)) {
    request(Replay::kProbe, now);
  }
}

}  // namespace kvferry::controller
