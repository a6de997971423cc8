#include "controller/state/state_journal.h"

#include <sys/eventfd.h>

#include <algorithm>

#include "controller/state/frames.h"
#include "controller/state/records.h"
#include "transport/base/log.h"

namespace kvferry::controller {
namespace {

constexpr std::size_t kBatchBytesMax = std::size_t{1} << 20;
constexpr std::size_t kSnapshotQueuedMax = std::size_t{8} << 20;
constexpr std::uint64_t kLogsMax = 8;              // so that a controller that ends often leaves no thousand files
constexpr std::int64_t kSnapshotRetryMs = 10'000;  // where the log is good

}  // namespace

struct StateJournal::Told {
  OwnedFd fd{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
  std::atomic<bool> is_wanted{false};  // while there is something to go on with
  void tell() const {
    if (is_wanted.load(std::memory_order_relaxed)) ::eventfd_write(fd.get(), 1);
  }
};

Result<std::unique_ptr<StateJournal>> StateJournal::open(StateOptions options, Directory& directory,
                                                         const Clock& clock) {
  const TimeNs begun = clock.now();
  Result<StateFolder> folder = StateFolder::open(options.folder);
  if (!folder) return std::move(folder).error();
  std::unique_ptr<StateJournal> journal(new StateJournal(std::move(options), std::move(*folder), directory, clock));
  Result<LoadedState> loaded = load_state(journal->folder_, journal->state_);
  if (!loaded) return std::move(loaded).error();
  journal->start(std::move(*loaded), begun);
  return journal;
}

StateJournal::StateJournal(StateOptions options, StateFolder folder, Directory& directory, const Clock& clock)
    : options_(std::move(options)),
      folder_(std::move(folder)),
      directory_(directory),
      clock_(clock),
      state_(directory),
      told_(std::make_unique<Told>()),
      log_(options_.write, [told = told_.get()] { told->tell(); }),
      snapshot_(options_.write, [told = told_.get()] { told->tell(); }) {}

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
    log().error("{}; what comes before is used, the nodes tell the rest again, and the file is kept as {}.damaged",
                loaded.damage, set_aside_.front());
  }
  directory_.set_journal(this);
  log().info("{} nodes and {} chunks were loaded from {} in {} ms", directory_.num_nodes(), directory_.num_chunks(),
             folder_.path(), status_.load_ms);
}

// --- What the directory tells ---------------------------------------------------------------------------------------

/// Whether to write the next record into batch_.
bool StateJournal::records() {
  if (!is_recording_) return false;
  if (batch_.size() > kBatchBytesMax) flush();
  if (batch_.empty()) begin_frame(batch_);
  return true;
}

void StateJournal::joined(NodeId node, const NodeInfo& info, std::uint64_t next_sequence) {
  kept_.erase(node);  // it may count anew
  if (records()) append_joined(batch_, node, info, next_sequence);
}
void StateJournal::gone(NodeId node) {
  kept_.erase(node);
  if (records()) append_gone(batch_, node);
}
void StateJournal::published(NodeId node, std::uint64_t sequence, SnapshotMark mark, Tier tier,
                             std::span<const ChunkEntry> chunks, bool is_partial) {
  if (records()) append_published(batch_, node, sequence, mark, tier, chunks, is_partial);
}
void StateJournal::evicted(NodeId node, std::uint64_t sequence, std::span<const ChunkKey> keys) {
  if (records()) append_evicted(batch_, node, sequence, keys);
}
void StateJournal::snapshot_dropped(NodeId node) {
  if (records()) append_snapshot_dropped(batch_, node);
}

std::uint64_t StateJournal::kept_below(NodeId node, std::uint64_t next_sequence) {
  const auto [it, is_new] = kept_.try_emplace(node);
  Kept& kept = it->second;
  if (!is_new && (!is_durable_ || log_.progress().written < kept.mark)) return kept.below;
  if (!is_new) kept.below = kept.next_below;
  kept.next_below = next_sequence;
  kept.mark = mark_ + (batch_.empty() ? 0 : 1);
  return kept.below;
}

// --- The log --------------------------------------------------------------------------------------------------------

void StateJournal::flush() {
  if (batch_.empty()) return;
  append_to_log(std::exchange(batch_, {}));
}

void StateJournal::append_to_log(std::string frame) {
  end_frame(frame);
  log_.append(std::move(frame), ++mark_);
}

void StateJournal::open_log(bool begins_anew) {
  flush();
  old_log_bytes_ += num_logs_opened_ == 0 ? 0 : log_.progress().size_bytes;
  log_.open(folder_.log(++number_));
  ++num_logs_opened_;
  log_begins_anew_ = begins_anew;
  std::string frame;
  begin_frame(frame);
  append_head(frame, {"log", kStateFormat, number_, begins_anew, state_.index_version()});
  append_to_log(std::move(frame));
}

void StateJournal::look_for_failures(TimeNs now) {
  const BackgroundFile::Progress written = log_.progress();
  if (is_recording_ && written.num_opened == num_logs_opened_ && !written.failure.empty())
    return fail(written.failure, now);
  if (is_recording_ && log_.queued_bytes() > options_.queued_bytes_max)
    return fail(fmt::format("{} is written too slowly", folder_.log(number_)), now);
  if (phase_ == Phase::kIdle) return;
  const BackgroundFile::Progress snapshot = snapshot_.progress();
  if (snapshot.num_opened != num_snapshots_opened_ || snapshot.failure.empty()) return;
  if (!is_durable_) return fail(snapshot.failure, now);
  log().warn("no snapshot of the controller's state for now: {}", snapshot.failure);
  abandon_snapshot();
  not_before_ = now + kSnapshotRetryMs * kMillisecond;
}

void StateJournal::fail(const std::string& why, TimeNs now) {
  if (is_durable_) {
    log().error("the controller's state is not kept any more: {}; the controller goes on without, and tries again",
                why);
  }
  is_durable_ = is_recording_ = false;
  why_not_ = why;
  batch_.clear();
  // Of no use without its snapshot; one that is being finished may come to be in spite of all.
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

void StateJournal::begin_snapshot(TimeNs) {
  wants_snapshot_ = false;
  is_recording_ = true;
  open_log(!is_durable_);
  snapshot_.open(folder_.unfinished_snapshot(number_));
  ++num_snapshots_opened_;
  std::string frame;
  begin_frame(frame);
  append_head(frame, {"snapshot", kStateFormat, number_, false, state_.index_version()});
  append_image(frame, state_.image());
  end_frame(frame);
  snapshot_.append(std::move(frame), 0);
  state_.begin_walk();
  phase_ = Phase::kWalking;
}

/// True: there is more that need not wait for the disk.
bool StateJournal::step_snapshot(TimeNs now) {
  switch (phase_) {
    case Phase::kIdle:
      return false;
    case Phase::kWalking: {
      if (snapshot_.queued_bytes() > kSnapshotQueuedMax) return false;
      std::string name_space, frame;
      const bool goes_on = state_.walk(block_, name_space);
      if (!block_.keys.empty()) {
        begin_frame(frame);
        append_block(frame, name_space, block_);
        end_frame(frame);
        snapshot_.append(std::move(frame), 0);
      }
      if (!goes_on) finish_walk();
      return true;
    }
    case Phase::kSyncing:
      if (log_.progress().synced < walk_mark_) return false;
      phase_ = Phase::kFinishing;
      snapshot_.finish(folder_.snapshot(number_),
                       [folder = folder_.path(), log = folder_.log(number_), snapshot = folder_.snapshot(number_),
                        set_aside = set_aside_] { StateFolder::remove_older(folder, log, snapshot, set_aside); });
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
  std::string frame;
  begin_frame(frame);
  append_end(frame);
  end_frame(frame);
  snapshot_.append(std::move(frame), 0);
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
  if (!is_durable_) log().info("the controller's state is kept again, in {}", folder_.path());
  is_durable_ = true;
  why_not_.clear();
}

// --- The server's turns ---------------------------------------------------------------------------------------------

int StateJournal::fd() const { return told_->fd.get(); }

bool StateJournal::take(TimeNs now) {
  eventfd_t count = 0;
  ::eventfd_read(told_->fd.get(), &count);
  flush();
  look_for_failures(now);
  const std::size_t log_bytes = old_log_bytes_ + log_.progress().size_bytes;
  if (log_bytes > std::max<std::size_t>(options_.log_bytes_min, status_.snapshot_bytes / 2)) wants_snapshot_ = true;
  if (phase_ == Phase::kIdle && (wants_snapshot_ || !is_durable_) && now >= not_before_) begin_snapshot(now);
  const bool has_more = step_snapshot(now);
  told_->is_wanted.store(phase_ != Phase::kIdle, std::memory_order_relaxed);
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
