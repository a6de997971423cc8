// Keeps a directory in a state folder: a log of its changes, and now and then a snapshot of it.
//
// Changes of one turn of the server's loop become one frame of the log, written by another thread. When the log has
// grown, a new log begins, and at the same moment an image of the nodes and a walk through the tables, a block a turn.
// A snapshot counts once the log of all that happened while it was made is on disk; then older files go.
// After a failure the log has a gap, and nothing is durable before the next snapshot.
#pragma once

#include <unistd.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "controller/directory/directory_state.h"
#include "controller/api/listener.h"
#include "controller/state/background_file.h"
#include "controller/state/load_state.h"
#include "controller/state/state_folder.h"

namespace kvferry::controller {

struct StateOptions {
  std::string folder;
  std::size_t log_bytes_min = std::size_t{16} << 20;     // a shorter log is no reason for a snapshot
  std::size_t queued_bytes_max = std::size_t{64} << 20;  // of the log, in memory: a disk that is slower has failed
  std::int64_t retry_ms = 1000;                          // after a failure
  WriteCall write = ::write;
};

/// A front that is driven last in each turn. Threads: the directory's.
class StateJournal final : public Journal, public Listener {
 public:
  /// Fills `directory`, which is new and outlives this, with what the folder holds, and keeps its changes from here on.
  /// kInvalidArgument, kRefused, kUnavailable: the folder can't be used; the sentence tells what to do.
  static Result<std::unique_ptr<StateJournal>> open(StateOptions options, Directory& directory, const Clock& clock);
  ~StateJournal() override;

  void joined(NodeId node, const NodeInfo& info, std::uint64_t next_sequence) override;
  void gone(NodeId node) override;
  void published(NodeId node, std::uint64_t sequence, SnapshotMark mark, Tier tier, std::span<const ChunkEntry> chunks,
                 bool is_partial) override;
  void evicted(NodeId node, std::uint64_t sequence, std::span<const ChunkKey> keys) override;
  void snapshot_dropped(NodeId node) override;
  std::uint64_t kept_below(NodeId node, std::uint64_t next_sequence) override;
  StateStatus status(TimeNs now) const override;

  /// Hands over what was told since; at the end of each turn, so that it is not kept later than need be.
  void flush();

  int fd() const override;
  bool take(TimeNs now) override;

  /// Begins a snapshot at the next take(), for tests and measurements.
  void want_snapshot() { wants_snapshot_ = true; }
  bool is_making_snapshot() const { return phase_ != Phase::kIdle; }
  /// Waits until all that was taken is written.
  void drain();

 private:
  enum class Phase { kIdle, kWalking, kSyncing, kFinishing };
  struct Kept {
    std::uint64_t below = 0;       // told
    std::uint64_t next_below = 0;  // to be told once `mark` is written
    std::uint64_t mark = 0;
  };
  struct Told;  // the end of an eventfd that other threads use

  StateJournal(StateOptions options, StateFolder folder, Directory& directory, const Clock& clock);
  void start(LoadedState loaded, TimeNs begun);
  bool records();
  void append_to_log(std::string frame);
  void open_log(bool begins_anew);
  void look_for_failures(TimeNs now);
  void fail(const std::string& why, TimeNs now);
  void abandon_snapshot();
  void begin_snapshot(TimeNs now);
  bool step_snapshot(TimeNs now);
  void finish_walk();
  void finished(TimeNs now);

  StateOptions options_;
  StateFolder folder_;
  Directory& directory_;
  const Clock& clock_;
  DirectoryState state_;
  std::unique_ptr<Told> told_;
  BackgroundFile log_, snapshot_;

  std::string batch_;       // a frame that is being filled; empty: nothing yet
  std::uint64_t mark_ = 0;  // of the last frame that was handed over
  std::unordered_map<NodeId, Kept> kept_;

  bool is_durable_ = false;
  bool is_recording_ = false;  // false: there is a gap anyway
  std::string why_not_;
  std::uint64_t number_ = 0;  // of the log
  std::uint64_t num_logs_opened_ = 0, num_snapshots_opened_ = 0;
  std::uint64_t old_log_bytes_ = 0;  // of logs before the one that is written
  std::vector<std::string> set_aside_;

  Phase phase_ = Phase::kIdle;
  bool wants_snapshot_ = false;
  bool log_begins_anew_ = false;
  TimeNs not_before_ = 0;        // the next attempt at a snapshot
  std::uint64_t walk_mark_ = 0;  // the log up to here belongs to the snapshot
  TableBlock block_;
  StateStatus status_;
  TimeNs snapshot_at_ = 0;
};

}  // namespace kvferry::controller
