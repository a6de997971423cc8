// The order of one engine's batches: what is applied, what was missed and is asked for again, and when the engine is
// another one than before. Pure: time is handed in, and what is to be sent is a wish.
//
// An engine numbers its batches from 0 when it starts and keeps the newest for replay. Numbers alone don't tell a
// restarted engine that has already got further than the old one; so after each break the batch before the missing one
// is asked for as well, and only if it is the one that was applied does the engine count as the same.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>

#include "transport/base/clock.h"

namespace kvferry::controller {

class EngineStreamSink {
 public:
  virtual ~EngineStreamSink() = default;
  virtual void apply(std::string_view payload) = 0;
  virtual void drop_everything() = 0;  // nothing that was applied holds any more
};

struct EngineStreamOptions {
  bool has_replay = true;
  TimeNs lease = 3 * kSecond;               // without a word, or without a connection
  TimeNs probe_after = kSecond;             // a silent engine is asked whether it lives
  TimeNs replay_patience = kSecond;         // without progress of a replay
  unsigned replay_tries = 3;                // then it goes on without
  TimeNs retry_first = 200 * kMillisecond;  // doubled up to:
  TimeNs retry_max = 10 * kSecond;
  TimeNs forget_after = 60 * kSecond;                  // of a lost engine
  std::size_t held_bytes_max = std::size_t{32} << 20;  // of batches that wait for the missing ones
};

struct EngineStreamCounters {
  std::uint64_t batches = 0;  // applied
  std::uint64_t duplicates = 0;
  std::uint64_t gaps = 0;             // batches were missing
  std::uint64_t gaps_unrepaired = 0;  // and could not be had again, so that all was dropped
  std::uint64_t restarts = 0;
  std::uint64_t replays = 0;  // asked for, retries and signs of life among them
  std::uint64_t losses = 0;   // no word for a lease
};

/// Threads: one at a time.
class EngineStream {
 public:
  EngineStream(const EngineStreamOptions& options, EngineStreamSink& sink, TimeNs now);

  void connected(TimeNs now);  // the subscription, for the first time or again
  void disconnected(TimeNs now);
  void heard(std::uint64_t sequence, std::string_view payload, TimeNs now);
  void replayed(std::uint64_t sequence, std::string_view payload, TimeNs now);
  void replay_ended(TimeNs now);
  /// At least every few 100 ms; late calls don't count against the engine.
  void tick(TimeNs now);

  /// The first sequence number to ask a replay for, on a new connection: what older requests bring is no longer
  /// wanted. Each wish is told once.
  std::optional<std::uint64_t> take_replay_wish();

  /// False: lost. What it holds is not credited.
  bool is_live() const { return is_live_; }
  /// Nothing is missing as far as anybody knows.
  bool is_confirmed() const { return is_live_ && !waits() && replay_ != Replay::kLater; }
  bool is_connected() const { return is_connected_; }
  TimeNs last_heard() const { return last_heard_; }
  const EngineStreamCounters& counters() const { return counters_; }

 private:
  enum class Replay {
    kNone,
    kFromStart,  // all that there is; nothing that was applied before holds
    kVerify,     // from the batch before the next one on
    kProbe,      // nothing but a sign of life
    kLater,      // tried in vain; batches are applied as they come until it is tried again
  };
  struct Held {
    std::uint64_t sequence;
    std::string payload;
  };

  bool waits() const { return replay_ == Replay::kFromStart || replay_ == Replay::kVerify; }
  void take(std::uint64_t sequence, std::string_view payload, TimeNs now);
  void apply(std::uint64_t sequence, std::string_view payload);
  void drop_everything();
  void restart(TimeNs now);
  void ask(Replay replay, TimeNs now);
  void repair(TimeNs now);
  void hold(std::uint64_t sequence, std::string_view payload, TimeNs now);
  void go_on_without_replay(TimeNs now);
  void apply_held(TimeNs now);
  void alive(TimeNs now);
  void lose(TimeNs now);

  EngineStreamOptions options_;
  EngineStreamSink& sink_;
  std::optional<std::uint64_t> next_;                    // the sequence number to apply; none: any
  std::optional<std::uint64_t> last_heard_sequence_;     // on this connection
  std::optional<std::uint64_t> last_replayed_sequence_;  // since the connection: those may come once more
  std::uint64_t last_applied_hash_ = 0;                  // of the batch before next_
  bool holds_anything_ = false;

  Replay replay_ = Replay::kNone;
  bool has_answered_ = false;  // the replay under way
  unsigned num_tries_ = 0;
  TimeNs replay_progress_at_ = 0;
  TimeNs retry_after_ = 0;
  std::optional<std::uint64_t> wish_;

  std::deque<Held> held_;
  std::size_t held_bytes_ = 0;

  bool is_connected_ = false;
  bool has_ever_replayed_ = false;  // or its silence there means nothing
  bool is_live_ = true;
  TimeNs last_heard_;
  TimeNs disconnected_at_;
  TimeNs lost_at_ = 0;
  TimeNs last_tick_;
  EngineStreamCounters counters_;
};

}  // namespace kvferry::controller
