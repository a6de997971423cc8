#include "controller/state/state_journal.h"

#include <algorithm>
#include <cstdio>

#include "controller/state/batches.h"
#include "controller/state/records.h"
#include "transport/base/log.h"

namespace kvferry::controller {
namespace {

constexpr std::size_t kWriteBytesMax = std::size_t{1} << 20;
constexpr std::size_t kSnapshotQueuedMax = std::size_t{8} << 20;
// If a start loads more logs than this, a snapshot follows, so that restarts don't accumulate files.
constexpr std::uint64_t kLogsMax = 8;
constexpr std::int64_t kSnapshotRetryMs = 10'000;  // pause after a failed snapshot if the log is intact

}  // namespace

Result<std::unique_ptr<StateJournal>> StateJournal::open(StateOptions options, Directory& directory,
                                                         const Clock& clock) {
  const TimeNs begun = clock.now();
  StateFolder folder = KVFERRY_TRY(StateFolder::open(options.folder));
  std::unique_ptr<StateJournal> journal(new StateJournal(std::move(options), std::move(folder), directory, clock));
  LoadedState loaded = KVFERRY_TRY(load_state(journal->folder_, journal->state_));
  journal->start(std::move(loaded), begun);
  return journal;
}

StateJournal::StateJournal(StateOptions options, StateFolder folder, Directory& directory, const Clock& clock)
    : options_(std::move(options)),
      folder_(std::move(folder)),
      directory_(directory),
      clock_(clock),
      state_(directory),
      log_(options_.write, [this] { wake_up(); }),
      snapshot_(options_.write, [this] { wake_up(); }) {}

/// Wakes the server's loop during a snapshot, which may wait for a file. Threads: those of log_ and snapshot_.
void StateJournal::wake_up() {
  if (wants_wake_up_.load(std::memory_order_relaxed)) wake_up_.set();
}

StateJournal::~StateJournal() {
  flush();
  if (phase_ != Phase::kIdle) abandon_snapshot();
  directory_.set_journal(nullptr);
}

void StateJournal::start(LoadedState loaded, TimeNs begun) {
  const TimeNs now = clock_.now();
  state_.finish(now);
  status_.folder = folder_.path();
  status_.records_loaded = loaded.num_records;
  status_.snapshot_bytes = loaded.snapshot_bytes;
  status_.load_ms = static_cast<std::uint64_t>((now - begun) / kMillisecond);
  snapshot_at_ = now;
  old_log_bytes_ = loaded.log_bytes;
  number_ = loaded.next_number - 1;
  set_aside_ = std::move(loaded.set_aside);
  wants_snapshot_ = loaded.num_logs > kLogsMax;
  if (loaded.damage.empty()) {
    is_durable_ = is_recording_ = true;
    open_log(false);
  } else {
    why_not_ = loaded.damage;
    log().error(
        "{}; the state up to there is loaded, and the nodes publish the rest again; files that can't be loaded get the "
        "suffix .damaged when the next snapshot is complete",
        loaded.damage);
  }
  directory_.set_journal(this);
  log().info("loaded {} nodes and {} chunks from {} in {} ms", directory_.num_nodes(), directory_.num_chunks(),
             folder_.path(), status_.load_ms);
}

// --- Changes of the directory ---------------------------------------------------------------------------------------

/// Makes batch_ ready for the next record. Returns false if changes are not recorded now.
bool StateJournal::begin_record() {
  if (!is_recording_) return false;
  if (batch_.size() > kWriteBytesMax) flush();
  if (batch_.empty()) begin_batch(batch_);
  return true;
}

void StateJournal::joined(NodeId node, const NodeInfo& info, std::uint64_t next_sequence) {
  durable_.erase(node);  // the node's sequence numbers may start anew
  if (begin_record()) append_joined(batch_, node, info, next_sequence);
}
void StateJournal::gone(NodeId node) {
  durable_.erase(node);
  if (begin_record()) append_gone(batch_, node);
}
void StateJournal::published(NodeId node, std::uint64_t sequence, SnapshotMark mark, Tier tier,
                             std::span<const ChunkEntry> chunks, bool is_partial) {
  if (begin_record()) append_published(batch_, node, sequence, mark, tier, chunks, is_partial);
}
void StateJournal::evicted(NodeId node, std::uint64_t sequence, std::span<const ChunkKey> keys) {
  if (begin_record()) append_evicted(batch_, node, sequence, keys);
}
void StateJournal::snapshot_dropped(NodeId node) {
  if (begin_record()) append_snapshot_dropped(batch_, node);
}

std::uint64_t StateJournal::kept_below(NodeId node, std::uint64_t next_sequence) {
  const auto [it, is_new] = durable_.try_emplace(node);
  Durable& durable = it->second;
  if (!is_new && (!is_durable_ || log_.progress().written < durable.mark)) return durable.below;
  if (!is_new) durable.below = durable.next_below;
  durable.next_below = next_sequence;
  durable.mark = mark_ + (batch_.empty() ? 0 : 1);
  return durable.below;
}

// --- The log --------------------------------------------------------------------------------------------------------

void StateJournal::flush() {
  if (batch_.empty()) return;
  append_to_log(std::exchange(batch_, {}));
}

void StateJournal::append_to_log(std::string batch) {
  end_batch(batch);
  log_.append(std::move(batch), ++mark_);
}

void StateJournal::open_log(bool begins_anew) {
  flush();
  old_log_bytes_ += num_logs_opened_ == 0 ? 0 : log_.progress().size_bytes;
  log_.open(folder_.log(++number_));
  ++num_logs_opened_;
  log_begins_anew_ = begins_anew;
  std::string batch;
  begin_batch(batch);
  append_head(batch, {"log", kStateFormat, number_, begins_anew, state_.index_version()});
  append_to_log(std::move(batch));
}

void StateJournal::check_failures(TimeNs now) {
  const BackgroundFile::Progress written = log_.progress();
  if (is_recording_ && written.num_opened == num_logs_opened_ && !written.failure.empty())
    return fail(written.failure, now);
  if (is_recording_ && log_.queued_bytes() > options_.queued_bytes_max)
    return fail(fmt::format("the disk is too slow: more than {} bytes wait to be written to {}",
                            options_.queued_bytes_max, folder_.log(number_)),
                now);
  if (phase_ == Phase::kIdle) return;
  const BackgroundFile::Progress snapshot = snapshot_.progress();
  if (snapshot.num_opened != num_snapshots_opened_ || snapshot.failure.empty()) return;
  if (!is_durable_) return fail(snapshot.failure, now);
  log().warn("a snapshot of the controller's state failed and will be retried in {} ms: {}", kSnapshotRetryMs,
             snapshot.failure);
  abandon_snapshot();
  not_before_ = now + kSnapshotRetryMs * kMillisecond;
}

void StateJournal::fail(const std::string& why, TimeNs now) {
  if (is_durable_) {
    log().error(
        "the controller's state is no longer durable: {}; the controller keeps serving from memory and tries to write "
        "a new snapshot every {} ms",
        why, options_.retry_ms);
  }
  is_durable_ = is_recording_ = false;
  why_not_ = why;
  batch_.clear();
  // A log that begins anew is useless without its snapshot, so it is discarded. But it is kept if the snapshot's last
  // step is running, because that step may still succeed.
  if (log_begins_anew_ && phase_ != Phase::kFinishing) log_.discard();
  if (phase_ != Phase::kIdle) abandon_snapshot();
  not_before_ = now + options_.retry_ms * kMillisecond;
}

// --- Snapshots ------------------------------------------------------------------------------------------------------

void StateJournal::abandon_snapshot() {
  if (phase_ == Phase::kWalking) state_.end_walk();
  phase_ = Phase::kIdle;
  snapshot_.discard();
}

void StateJournal::begin_snapshot() {
  wants_snapshot_ = false;
  is_recording_ = true;
  open_log(!is_durable_);
  snapshot_.open(folder_.unfinished_snapshot(number_));
  ++num_snapshots_opened_;
  std::string batch;
  begin_batch(batch);
  append_head(batch, {"snapshot", kStateFormat, number_, false, state_.index_version()});
  append_image(batch, state_.image());
  end_batch(batch);
  snapshot_.append(std::move(batch), 0);
  state_.begin_walk();
  phase_ = Phase::kWalking;
}

/// Runs the next step of the snapshot. Returns true if the server should call serve() again without waiting.
bool StateJournal::step_snapshot(TimeNs now) {
  switch (phase_) {
    case Phase::kIdle:
      return false;
    case Phase::kWalking: {
      if (snapshot_.queued_bytes() > kSnapshotQueuedMax) return false;
      std::string name_space, batch;
      const bool goes_on = state_.walk(block_, name_space);
      if (!block_.keys.empty()) {
        begin_batch(batch);
        append_block(batch, name_space, block_);
        end_batch(batch);
        snapshot_.append(std::move(batch), 0);
      }
      if (!goes_on) finish_walk();
      return true;
    }
    case Phase::kSyncing:
      if (log_.progress().synced < walk_mark_) return false;
      phase_ = Phase::kFinishing;
      snapshot_.finish(folder_.snapshot(number_), [this, number = number_, set_aside = set_aside_] {
        for (const std::string& path : set_aside) ::rename(path.c_str(), (path + ".damaged").c_str());
        folder_.remove_below(number);
      });
      return false;
    case Phase::kFinishing:
      if (const BackgroundFile::Progress file = snapshot_.progress();
          file.num_opened == num_snapshots_opened_ && file.is_finished)
        finished(now);
      return false;
  }
  return false;
}

void StateJournal::finish_walk() {
  state_.end_walk();
  std::string batch;
  begin_batch(batch);
  append_end(batch);
  end_batch(batch);
  snapshot_.append(std::move(batch), 0);
  flush();
  walk_mark_ = mark_;
  log_.sync();
  phase_ = Phase::kSyncing;
}

void StateJournal::finished(TimeNs now) {
  phase_ = Phase::kIdle;
  ++status_.snapshots_written;
  status_.snapshot_bytes = snapshot_.progress().size_bytes;
  snapshot_at_ = now;
  old_log_bytes_ = 0;
  log_begins_anew_ = false;
  set_aside_.clear();
  if (!is_durable_) log().info("the controller's state is durable again, in {}", folder_.path());
  is_durable_ = true;
  why_not_.clear();
}

// --- Turns of the server's loop -------------------------------------------------------------------------------------

int StateJournal::fd() const { return wake_up_.fd(); }

bool StateJournal::serve(TimeNs now) {
  wake_up_.clear();
  flush();
  check_failures(now);
  const std::size_t log_bytes = old_log_bytes_ + log_.progress().size_bytes;
  if (log_bytes > std::max<std::size_t>(options_.log_bytes_min, status_.snapshot_bytes / 2)) wants_snapshot_ = true;
  if (phase_ == Phase::kIdle && (wants_snapshot_ || !is_durable_) && now >= not_before_) begin_snapshot();
  const bool has_more = step_snapshot(now);
  wants_wake_up_.store(phase_ != Phase::kIdle, std::memory_order_relaxed);
  return has_more;
}

void StateJournal::drain() {
  flush();
  log_.drain();
  snapshot_.drain();
}

StateStatus StateJournal::status(TimeNs now) const {
  StateStatus status = status_;
  status.durable = is_durable_;
  status.why_not = why_not_;
  status.log_bytes = old_log_bytes_ + log_.progress().size_bytes;
  status.snapshot_age_ms = status.snapshot_bytes == 0
                               ? 0
                               : static_cast<std::uint64_t>(std::max<TimeNs>(0, now - snapshot_at_) / kMillisecond);
  return status;
}

}  // namespace kvferry::controller
