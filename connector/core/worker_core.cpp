#include "connector/core/worker_core.h"

#include <set>
#include <utility>

#include "connector/core/promises.h"

namespace kvferry {
namespace {

constexpr std::int64_t kPullTimeoutMaxMs = 24 * 3600 * 1000;

}  // namespace

WorkerCore::Slot& WorkerCore::slot(ChunkRef chunk) {
  KVFERRY_CHECK(chunk.slot < slots_.size(), "pool slot {} does not exist: the pool has {} slots", chunk.slot,
                slots_.size());
  return slots_[chunk.slot];
}

void WorkerCore::begin_step(std::uint64_t step) {
  KVFERRY_CHECK(step > step_,
                "exactly-once: the plan of step {} came after that of step {}; each must come once, in order", step,
                step_);
  step_ = step;
}

void WorkerCore::begin_write(ChunkRef chunk) {
  Slot& target = slot(chunk);
  promise::fenced_reuse(0, !target.writing && chunk.generation > target.generation, chunk.slot);
  target = {chunk.generation, true, false, false};
}

bool WorkerCore::writable(ChunkRef chunk) const {
  return chunk.slot < slots_.size() && !slots_[chunk.slot].writing && chunk.generation > slots_[chunk.slot].generation;
}

void WorkerCore::end_write(ChunkRef chunk, bool ok) {
  Slot& target = slot(chunk);
  promise::exactly_once(target.writing && target.generation == chunk.generation && !target.in_frame,
                        "the report on the write of pool slot {}", chunk.slot);
  target.writing = false;
  target.complete = ok;
}

/// Records that the chunk is complete in a frame, from which its slot is still being written.
void WorkerCore::reached_frame(ChunkRef chunk) {
  Slot& target = slot(chunk);
  promise::exactly_once(target.writing && target.generation == chunk.generation && !target.in_frame,
                        "the report that the chunk of pool slot {} is in a frame", chunk.slot);
  target.in_frame = true;
}

void WorkerCore::slot_written(ChunkRef chunk, bool ok) {
  Slot& target = slot(chunk);
  promise::exactly_once(target.generation == chunk.generation && target.in_frame,
                        "the report on the copy to pool slot {}", chunk.slot);
  target.in_frame = false;
  end_write(chunk, ok);
}

void WorkerCore::saved(const SaveDone& save) {
  if (save.is_in_frame)
    reached_frame(save.chunk);
  else if (slot(save.chunk).in_frame)
    slot_written(save.chunk, save.ok);
  else
    end_write(save.chunk, save.ok);
  report_.saves.push_back(save);
}

bool WorkerCore::readable(ChunkRef chunk) const {
  if (chunk.slot >= slots_.size()) return false;
  const Slot& source = slots_[chunk.slot];
  return source.complete && !source.writing && source.generation == chunk.generation;
}

bool WorkerCore::loadable(ChunkRef chunk) const {
  if (readable(chunk)) return true;
  return chunk.slot < slots_.size() && slots_[chunk.slot].in_frame && slots_[chunk.slot].generation == chunk.generation;
}

bool WorkerCore::arriving(ChunkRef chunk) const {
  return chunk.slot < slots_.size() && slots_[chunk.slot].writing && slots_[chunk.slot].generation == chunk.generation;
}

void WorkerCore::loaded(const LoadJob& job, LoadOutcome outcome) {
  report_.loads.push_back({job.request_id, job.attempt, outcome.tokens_loaded, std::move(outcome.corrupt)});
}

void WorkerCore::accesses_refused(std::uint64_t total) {
  report_.accesses_refused += total - std::exchange(num_accesses_refused_, total);
}

std::optional<WorkerReport> WorkerCore::take_report() {
  if (report_.saves.empty() && report_.loads.empty() && report_.accesses_refused == 0) return std::nullopt;
  report_.rank = rank_;
  report_.step = step_;
  return std::exchange(report_, {});
}

Result<void> WorkerCore::pull_ordered(const PullOrder& order, TimeNs now) {
  if (pulls_.contains(order.pull))
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("pull {} is in progress already, so it can't be started again", order.pull)};
  if (order.timeout_ms <= 0 || order.timeout_ms > kPullTimeoutMaxMs)
    return Error{ErrorCode::kInvalidArgument, fmt::format("the timeout of pull {} is {} ms; allowed: 1 to {} ms",
                                                          order.pull, order.timeout_ms, kPullTimeoutMaxMs)};
  std::set<std::uint32_t> slots;
  for (const PullItem& item : order.items) {
    if (!writable(item.local) || !slots.insert(item.local.slot).second)
      return Error{
          ErrorCode::kInvalidArgument,
          fmt::format(
              "pull {} can't write pool slot {} in its generation {} (number of chunks it has had): the pool of {} "
              "slots has no such slot, or the slot is being written, is named twice in the order, or is in "
              "this generation or a later one already",
              order.pull, item.local.slot, item.local.generation, slots_.size())};
  }
  Pull pull;
  pull.deadline = now + order.timeout_ms * kMillisecond;
  promise::bounded_hold(now, pull.deadline, fmt::format("pull {}", order.pull));
  for (const PullItem& item : order.items) {
    begin_write(item.local);
    pull.chunks.push_back(item.local);
  }
  pulls_.emplace(order.pull, std::move(pull));
  return {};
}

PullOutcome WorkerCore::pull_ended(std::uint64_t id, std::vector<bool> ok, std::string what,
                                   std::vector<bool> in_frames) {
  const auto found = pulls_.find(id);
  promise::exactly_once(found != pulls_.end() && ok.size() == found->second.chunks.size(), "the end of pull {}", id);
  in_frames.resize(ok.size(), false);
  for (std::size_t i = 0; i < ok.size(); ++i) {
    const ChunkRef chunk = found->second.chunks[i];
    in_frames[i] = in_frames[i] && ok[i];
    if (in_frames[i])
      reached_frame(chunk);
    else
      end_write(chunk, ok[i]);
  }
  pulls_.erase(found);
  PullOutcome outcome{id, rank_, std::move(ok), std::move(what), {}};
  outcome.in_frames = std::move(in_frames);
  return outcome;
}

std::vector<std::uint64_t> WorkerCore::overdue_pulls(TimeNs now) {
  std::vector<std::uint64_t> overdue;
  for (auto& [id, pull] : pulls_) {
    if (pull.cancelled || pull.deadline > now) continue;
    pull.cancelled = true;
    overdue.push_back(id);
  }
  return overdue;
}

}  // namespace kvferry
