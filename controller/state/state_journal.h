// Persists a directory in a state folder: a log of its changes, and occasional snapshots.
//
// The changes of one turn of the server's loop form a batch of the log, or several if they are large; another thread
// writes the batches. When the log has grown, a new log begins together with a snapshot: an image of the nodes, and a
// walk through the directory's tables, one TableBlock (part of a table) each turn. The snapshot is valid once the log
// of the changes during the walk is on disk; then older files are removed. If the log can't be written,
// it has a gap, and the state is not durable before the next snapshot.
#pragma once

#include <unistd.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "controller/api/listener.h"
#include "controller/directory/directory_state.h"
#include "controller/state/background_file.h"
#include "controller/state/state_folder.h"
#include "transport/base/net/event_fd.h"

namespace kvferry::controller {

struct StateOptions {
  std::string folder;
  std::size_t log_bytes_min = std::size_t{16} << 20;  // a smaller log does not cause a snapshot by its size
  // Limit on unwritten bytes of the log. A log with more unwritten bytes counts as failed.
  std::size_t queued_bytes_max = std::size_t{64} << 20;
  std::int64_t retry_ms = 1000;  // pause before the next attempt while the state is not durable
  WriteCall write = ::write;
};

/// Records changes as the directory's Journal, and makes snapshots as a Listener of the server. Threads: the
/// directory's owner thread.
class StateJournal final : public Journal, public Listener {
 public:
  /// Loads the folder into `directory`, which must be empty and outlive the journal, and then records its changes.
  /// kInvalidArgument, kRefused, kUnavailable: the folder is unusable; the message says why.
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

  /// Queues the current batch for writing. The server calls flush() at the end of each turn.
  void flush();

  int fd() const override;
  bool serve(TimeNs now) override;

  /// Makes the next serve() that can begin a snapshot do so; for tests and benchmarks.
  void want_snapshot() { wants_snapshot_ = true; }
  bool is_making_snapshot() const { return phase_ != Phase::kIdle; }
  /// Waits until all recorded changes are written.
  void drain();

 private:
  enum class Phase { kIdle, kWalking, kSyncing, kFinishing };
  struct Durable {
    std::uint64_t below = 0;       // messages with lower numbers are durable; last value reported to the node
    std::uint64_t next_below = 0;  // the next value of `below`, valid once the batch with number `mark` is written
    std::uint64_t mark = 0;
  };

  StateJournal(StateOptions options, StateFolder folder, Directory& directory, const Clock& clock);
  void start(LoadedState loaded, TimeNs begun);
  void wake_up();
  bool begin_record();
  void append_to_log(std::string batch);
  void open_log(bool begins_anew);
  void check_failures(TimeNs now);
  void fail(const std::string& why, TimeNs now);
  void abandon_snapshot();
  void begin_snapshot();
  bool step_snapshot(TimeNs now);
  void finish_walk();
  void finished(TimeNs now);

  StateOptions options_;
  StateFolder folder_;
  Directory& directory_;
  const Clock& clock_;
  DirectoryState state_;
  EventFd wake_up_{std::nothrow};
  std::atomic<bool> wants_wake_up_{false};  // set during a snapshot, whose next step may have to wait for a file
  BackgroundFile log_, snapshot_;

  std::string batch_;       // changes since the last flush(); empty: no changes
  std::uint64_t mark_ = 0;  // number of the last queued batch
  std::unordered_map<NodeId, Durable> durable_;

  bool is_durable_ = false;
  bool is_recording_ = false;  // false: the log has a gap until the next snapshot
  std::string why_not_;
  std::uint64_t number_ = 0;  // number of the current log
  std::uint64_t num_logs_opened_ = 0, num_snapshots_opened_ = 0;
  std::uint64_t old_log_bytes_ = 0;  // size of the logs before the current one
  std::vector<std::string> set_aside_;

  Phase phase_ = Phase::kIdle;
  bool wants_snapshot_ = false;
  bool log_begins_anew_ = false;
  TimeNs not_before_ = 0;        // earliest time of the next snapshot
  std::uint64_t walk_mark_ = 0;  // number of the last batch of the log that the snapshot needs
  TableBlock block_;
  StateStatus status_;
  TimeNs snapshot_at_ = 0;
};

}  // namespace kvferry::controller
