// Puts one engine's batches in order: applies them, requests a replay of missing ones, and detects a restarted engine.
// Pure: the caller passes the time and sends the requests for replays.
//
// An engine numbers its batches from 0 when it starts and keeps the newest for replay. The numbers don't reveal a
// restart if the engine has published more batches since the restart than before it. So after each interruption the
// replay also covers the last applied batch, and the engine counts as the same only if that batch is unchanged.
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
  virtual void drop_everything() = 0;  // undoes all applied batches: the engine's blocks are unknown
};

struct EngineStreamOptions {
  bool has_replay = true;
  // Time after which a disconnected engine is lost. A silent engine is lost after this time only if it has ever
  // answered a replay request. An engine without applied batches is never lost.
  TimeNs lease = 3 * kSecond;
  TimeNs probe_after = kSecond;             // silence after which the engine is probed
  TimeNs replay_timeout = kSecond;          // pause in a replay after which the replay is requested again
  unsigned replay_tries = 3;                // attempts at a replay; then the stream continues without one
  TimeNs retry_first = 200 * kMillisecond;  // pause before a retry, doubled for each failed try up to retry_max
  TimeNs retry_max = 10 * kSecond;
  TimeNs drop_after = 60 * kSecond;                       // time after which a lost engine's blocks are dropped
  std::size_t waiting_bytes_max = std::size_t{32} << 20;  // limit on the size of batches that wait for missing ones
};

struct EngineStreamCounters {
  std::uint64_t batches = 0;  // number of applied batches
  std::uint64_t duplicates = 0;
  std::uint64_t gaps = 0;  // number of times that the sequence numbers skipped batches
  // Number of times that all blocks of the engine were dropped, because batches were missing or might be missing and no
  // replay delivered them.
  std::uint64_t gaps_unrepaired = 0;
  std::uint64_t restarts = 0;
  std::uint64_t replays = 0;  // requested replays, including retries and probes
  std::uint64_t losses = 0;   // number of times that the engine was lost, see EngineStreamOptions::lease
};

/// The batches of one engine's events, in order. Threads: one at a time.
class EngineStream {
 public:
  EngineStream(const EngineStreamOptions& options, EngineStreamSink& sink, TimeNs now);

  void connected(TimeNs now);  // called when the subscription was connected or reconnected
  void disconnected(TimeNs now);
  void received(std::uint64_t sequence, std::string_view payload, TimeNs now);
  void replayed(std::uint64_t sequence, std::string_view payload, TimeNs now);
  void replay_ended(TimeNs now);
  /// Checks all timeouts; must be called at least every few 100 ms. The time between two calls does not count as
  /// silence of the engine if it is longer than half a lease.
  void tick(TimeNs now);

  /// Returns the sequence number from which the caller must request a replay now, or nullopt if there is no new
  /// request. Returns each request once. The caller must use a new connection for each request, so that answers to
  /// older requests never arrive.
  std::optional<std::uint64_t> take_replay_request();

  /// Returns false if the engine is lost; lookups then ignore its blocks.
  bool is_live() const { return is_live_; }
  /// Returns true if the engine is live and no replay of missing batches is running or will be tried again. After a gap
  /// that no replay can fill, all blocks were dropped, so the blocks applied since are up to date.
  bool is_confirmed() const { return is_live_ && !is_replaying() && replay_ != Replay::kLater; }
  bool is_connected() const { return is_connected_; }
  TimeNs last_received() const { return last_received_at_; }
  const EngineStreamCounters& counters() const { return counters_; }

 private:
  enum class Replay {
    kNone,
    kFromStart,  // all batches that the engine still has; they replace the batches applied before
    kVerify,     // the last applied batch and later ones, to check that the engine is the same
    kProbe,      // no batches; only checks that the engine is alive
    kLater,      // a replay failed or was too slow; batches are applied as they arrive until a new try is answered
  };
  struct Waiting {
    std::uint64_t sequence;
    std::string payload;
  };

  bool is_replaying() const { return replay_ == Replay::kFromStart || replay_ == Replay::kVerify; }
  void take_in_order(std::uint64_t sequence, std::string_view payload, TimeNs now);
  void apply(std::uint64_t sequence, std::string_view payload);
  void drop_everything();
  void restart(TimeNs now);
  void request(Replay replay, TimeNs now);
  void repair(TimeNs now);
  void enqueue(std::uint64_t sequence, std::string_view payload, TimeNs now);
  void continue_without_replay(TimeNs now);
  void apply_waiting(TimeNs now);
  void note_alive(TimeNs now);
  void lose(TimeNs now);

  EngineStreamOptions options_;
  EngineStreamSink& sink_;
  std::optional<std::uint64_t> next_;                    // sequence number of the next batch; none: unknown
  std::optional<std::uint64_t> last_received_sequence_;  // newest sequence number received on the current connection
  std::optional<std::uint64_t>
      last_replayed_sequence_;  // newest replayed sequence number; the subscription may deliver batches up to it again
  std::uint64_t last_applied_hash_ = 0;  // hash of the last applied batch's payload
  bool has_applied_ = false;

  Replay replay_ = Replay::kNone;
  bool has_answered_ = false;  // whether a batch of the current replay has arrived
  unsigned num_tries_ = 0;
  TimeNs replay_progress_at_ = 0;
  TimeNs retry_after_ = 0;
  std::optional<std::uint64_t> replay_request_;

  std::deque<Waiting> waiting_;
  std::size_t waiting_bytes_ = 0;

  bool is_connected_ = false;
  bool has_ever_replayed_ = false;  // whether the engine has ever answered a replay; only then can silence make it lost
  bool is_live_ = true;
  TimeNs last_received_at_;
  TimeNs disconnected_at_;
  TimeNs lost_at_ = 0;
  TimeNs last_tick_;
  EngineStreamCounters counters_;
};

}  // namespace kvferry::controller
