#include "connector/runtime/worker/puller.h"

#include <algorithm>

#include "connector/runtime/links/node_wire.h"
#include "transport/base/checksum.h"
#include "transport/base/log.h"

namespace kvferry {

/// Checks the numbers used as indexes, sizes and divisors. The transport checks that runs lie in the source's region.
Result<void> Puller::check(const PullOrder& order) const {
  const auto bad = [&](std::string what) {
    return Error{ErrorCode::kInvalidArgument, fmt::format("pull {} is not valid: {}", order.pull, what)};
  };
  for (const PullItem& item : order.items)
    if (!parts_.fits(item.local, item.num_tokens) || !parts_.divides(item.num_tokens, order.num_cells))
      return bad(fmt::format("it writes {} tokens into slot {} in {} cells, but there are {} slots of up to {} tokens",
                             item.num_tokens, item.local.slot, order.num_cells, parts_.pool.size() / parts_.slot_bytes,
                             parts_.slot_bytes / parts_.bytes_per_token));
  if (order.sources.empty()) return {};
  for (const ShardRun& run : order.runs) {
    if (run.holder >= order.sources.size() || run.cells > order.num_cells || run.target > order.num_cells - run.cells)
      return bad(
          fmt::format("its part of {} cells (heads of a layer) at cell {} from source {} is out of range; a chunk has "
                      "{} cells, and there are {} sources",
                      run.cells, run.target, run.holder, order.num_cells, order.sources.size()));
  }
  return order.num_cells > 0 ? Result<void>{} : bad("its chunks have 0 cells (heads of a layer); allowed: 1 or more");
}

/// Asks the store where each chunk lands, and starts a transfer for each region and source.
void Puller::start(PullOrder order) {
  Result<void> ok = check(order);
  if (ok) ok = parts_.core.locked([&](WorkerCore& core) { return core.pull_ordered(order, parts_.clock.now()); });
  if (!ok) {
    log().error("an order of this server's scheduler node to pull chunks is refused: {}", ok.error().what);
    send_(seal(order.pull, PullOutcome{order.pull, parts_.core.rank(), std::vector<bool>(order.items.size(), false),
                                       std::move(ok.error().what)}));
    return;
  }
  const auto pull = std::make_shared<Pull>(std::move(order));
  pull->began = pull->grown_at = parts_.clock.now();
  if (pull->order.items.empty()) return end(*pull);
  look_for_frames(*pull);
  Pieces pieces;
  for (std::size_t i = 0; i < pull->order.items.size(); ++i) plan_or_settle(pull, i, pieces);
  for (auto& [place, piece] : pieces) submit(std::move(piece));
}

/// Finds out whether a path leads from the holder's frames to frames here.
void Puller::look_for_frames(Pull& pull) {
  const PullOrder& order = pull.order;
  const bool are_here = parts_.store.frames().has_value(), are_there = !order.remote_frames.empty();
  if (!are_here && !are_there) return;  // no reason is reported if neither node has frames of GPU memory
  if (pull.has_runs())
    pull.frames_why = "the ranks of the two nodes hold different layers or heads";
  else if (!are_here)
    pull.frames_why = "this node has no frames of GPU memory that a transfer reaches";
  else if (!are_there)
    pull.frames_why = "the other node has no frames of GPU memory that a transfer reaches";
  else if (const Result<void> path = frame_paths_.check(order.remote_address, order.remote_frames); !path)
    pull.frames_why = path.error().what;
  pull.uses_frames = pull.frames_why.empty();
}

Result<void> Puller::plan(const PullPtr& pull, std::size_t index, Pieces& pieces) {
  const PullOrder& order = pull->order;
  const PullItem& item = order.items[index];
  const std::uint32_t rank = parts_.core.rank();
  const std::uint64_t bytes = item.num_tokens * parts_.bytes_per_token;
  const ShardRun all{0, 0, 0, 1};
  const std::uint64_t cell_bytes = pull->has_runs() ? bytes / order.num_cells : bytes;
  const std::span<const ShardRun> runs = pull->has_runs() ? std::span(order.runs) : std::span(&all, 1);
  if (item.is_growing) {
    const auto [place, in_frames] = KVFERRY_TRY(place_of(*pull, item));
    if (!in_frames) return Error{ErrorCode::kInvalidArgument, "a chunk that grows in no frame can't be pulled"};
    pull->ok[index] = true;
    pull->num_pieces[index] = 1;
    pull->growths[index] = {true, place.offset, 0};
    growing_[order.pull] = pull;
    return {};
  }
  std::vector<std::uint64_t> checksums;
  if (!pull->has_runs() && rank < item.checksums.size()) checksums.push_back(item.checksums[rank]);
  if (pull->has_runs() && !item.run_checksums.empty()) checksums = item.run_checksums[0];
  if (checksums.size() != runs.size())
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("the order of pull {} has no checksum of a chunk for rank {}", order.pull, rank)};
  const auto [place, in_frames] = KVFERRY_TRY(place_of(*pull, item));
  const PullSource only{order.remote_address, in_frames ? order.remote_frames : order.remote_region,
                        in_frames ? order.remote_frame_bytes : parts_.slot_bytes};
  const std::span<const PullSource> sources = pull->has_runs() ? std::span(order.sources) : std::span(&only, 1);
  if (pull->has_runs()) parts_.clear_gaps(item.local, item.num_tokens, runs, order.num_cells);
  pull->ok[index] = true;
  for (std::size_t r = 0; r < runs.size(); ++r) {
    const ShardRun& run = runs[r];
    const PullSource& source = sources[run.holder];
    Piece& piece = pieces[{place.region, run.holder}];
    if (piece.items.empty() || piece.items.back() != index) pull->num_pieces[index] += 1;
    piece.pull = pull;
    piece.address = source.address;
    piece.remote_region = source.region;
    piece.region = place.region;
    piece.is_in_frames = in_frames;
    const std::uint64_t remote = in_frames ? item.frames[rank] : item.remote.slot;
    piece.ranges.push_back({place.offset + run.target * cell_bytes,
                            remote * source.slot_bytes + run.source * cell_bytes, run.cells * cell_bytes});
    piece.checksums.push_back(checksums[r]);
    piece.items.push_back(index);
  }
  return {};
}

/// Asks the store where a chunk may be written: into a frame, if the holder has the chunk in a frame, a path leads to
/// the frames here, and one of them is free; otherwise into the chunk's slot. That is an error if the holder does not
/// have the chunk in its slot yet.
Result<Puller::Target> Puller::place_of(Pull& pull, const PullItem& item) {
  const std::uint32_t rank = parts_.core.rank();
  const std::uint64_t bytes = item.num_tokens * parts_.bytes_per_token;
  const bool is_in_frame = !pull.has_runs() && rank < item.frames.size() && item.frames[rank] != kNoFrame;
  Target target;
  if (is_in_frame && pull.uses_frames) {
    target.place = KVFERRY_TRY(parts_.store.land(item.local, bytes));
    target.is_in_frames = target.place.region == parts_.store.frames()->region;
    if (!target.is_in_frames) pull.host_why = "no frame of GPU memory was free on this node";
    (target.is_in_frames ? pull.num_in_frames : pull.num_past_frames) += 1;
  } else {
    if (is_in_frame) pull.num_past_frames += 1;
    if (!pull.uses_frames || pull.host_why.empty())
      pull.host_why = pull.uses_frames ? "the other node had the chunk in host memory" : pull.frames_why;
    target.place = KVFERRY_TRY(parts_.store.land_in_slot(item.local, bytes));
  }
  if (item.lacks_slots && !target.is_in_frames)
    return Error{ErrorCode::kUnavailable,
                 "chunks that the other node had in GPU memory only can't be pulled: " + pull.host_why};
  return target;
}

void Puller::submit(Piece piece) {
  PagedTransfer transfer{{}, Direction::kPull, piece.region, piece.remote_region, piece.ranges, {}};
  transfer.checksums = piece.checksums;
  const Result<TransferId> id = peers_.submit(piece.address, std::move(transfer));
  if (id) {
    piece.pull->posted_at = parts_.clock.now();
    running_.emplace(*id, std::move(piece));
  } else if (id.error().code == ErrorCode::kFull) {
    waiting_.push_back(std::move(piece));
  } else if (piece.is_in_frames && !piece.is_growing) {
    submit_from_slots(piece, id.error().what);
  } else {
    fail(piece, id.error().code, id.error().what);
  }
}

/// Pulls the chunks of a piece from slot to slot, after the piece's transfer from frame to frame has failed. Those that
/// the holder does not have in its slots yet fail.
void Puller::submit_from_slots(const Piece& failed, const std::string& why) {
  Pull& pull = *failed.pull;
  log().warn("pulling {} chunks from GPU to GPU failed, so they are pulled through host memory: {}",
             failed.items.size(), why);
  frame_paths_.failed(failed.address, why);
  pull.frames_why = pull.host_why = why;
  pull.uses_frames = false;
  Pieces pieces;
  for (const std::size_t index : failed.items) {
    pull.num_in_frames -= 1;
    pull.num_pieces[index] = 0;
    plan_or_settle(failed.pull, index, pieces);
  }
  for (auto& [place, piece] : pieces) submit(std::move(piece));
}

bool Puller::completed(const Completion& completion, std::uint32_t limit_mb_per_s) {
  const auto found = running_.find(completion.id);
  if (found == running_.end()) return false;
  const Piece piece = std::move(found->second);
  running_.erase(found);
  piece.pull->arrived_at = parts_.clock.now();
  // The transport has compared the checksum of each range, so the other ranges of a corrupt transfer are good.
  const bool is_here = completion.code == ErrorCode::kOk || completion.code == ErrorCode::kCorrupt;
  if (!is_here && piece.is_growing && !piece.pull->is_overdue) {
    frame_paths_.failed(piece.address, completion.what);
  } else if (!is_here && piece.is_in_frames && !piece.pull->is_overdue) {
    submit_from_slots(piece, piece.is_given_up ? fmt::format("a transfer from GPU to GPU took over {} ms",
                                                             piece.pull->order.timeout_ms / 2)
                                               : completion.what);
    return true;
  }
  std::vector<bool> ok(piece.ranges.size(), is_here);
  for (const std::uint32_t index : completion.corrupt_ranges) ok[index] = false;
  piece.pull->limit_mb_per_s = std::max(piece.pull->limit_mb_per_s, limit_mb_per_s);
  close(piece, ok, completion);
  return true;
}

/// Ends a piece. When the last piece of a chunk has ended, the chunk is passed to the store.
void Puller::close(const Piece& piece, const std::vector<bool>& ok, const Completion& end) {
  Pull& pull = *piece.pull;
  if (!end.what.empty()) pull.what = end.what;
  if (end.code != ErrorCode::kOk) pull.code = end.code;
  pull.path = end.path;
  LandedChunks landed;
  for (std::size_t r = 0; r < piece.items.size(); ++r) {
    const std::size_t index = piece.items[r];
    if (!ok[r]) pull.ok[index] = false;
    const bool is_last_range = r + 1 == piece.items.size() || piece.items[r + 1] != index;
    if (is_last_range) end_piece(piece.pull, index, landed);
  }
  if (!landed.empty()) parts_.store.landed(landed);
}

/// Counts the end of one piece of a chunk. After the last one the chunk is added to `landed`.
void Puller::end_piece(const PullPtr& pull, std::size_t index, LandedChunks& landed) {
  if (--pull->num_pieces[index] > 0) return;
  const PullItem& item = pull->order.items[index];
  if (pull->ok[index]) pull->checksums[index] = checksum_of(*pull, index);
  landing_[item.local] = {pull, index};
  landed.push_back({item.local, pull->ok[index], pull->checksums[index], false, !item.is_growing});
}

/// Returns this rank's checksum of a chunk whose bytes have arrived and are verified.
std::uint64_t Puller::checksum_of(const Pull& pull, std::size_t index) const {
  const PullItem& item = pull.order.items[index];
  if (!pull.has_runs()) return item.checksums[parts_.core.rank()];
  if (pull.order.runs.size() == 1 && pull.order.runs[0].cells == pull.order.num_cells) return item.run_checksums[0][0];
  return chunk_checksum(parts_.chunk_bytes(item.local, item.num_tokens));
}

bool Puller::landed(const ChunkStore::Landed& chunk) {
  const auto found = landing_.find(chunk.chunk);
  if (found == landing_.end()) return false;
  const auto [pull, item] = found->second;
  if (!chunk.is_in_frame) landing_.erase(found);
  if (pull->in_frames[item]) {
    slot_written(*pull, item, chunk.ok);
    return true;
  }
  pull->in_frames[item] = chunk.is_in_frame;
  settle(*pull, item, chunk.ok);
  return true;
}

/// Takes the outcome of a chunk's copy to its slot, after the store has reported the chunk in a frame.
void Puller::slot_written(Pull& pull, std::size_t item, bool ok) {
  pull.in_frames[item] = false;
  if (!pull.has_ended) {  // the pull still waits for other chunks, and its outcome will report this one
    pull.ok[item] = ok;
    return;
  }
  const ChunkRef chunk = pull.order.items[item].local;
  parts_.core.locked([&](WorkerCore& core) { core.slot_written(chunk, ok); });
  written_.chunks.push_back(chunk);
  written_.ok.push_back(ok);
}

void Puller::settle(Pull& pull, std::size_t item, bool ok) {
  pull.ok[item] = ok;
  if (--pull.num_left == 0) end(pull);
}

void Puller::end(Pull& pull) {
  if (!pull.what.empty())
    log().warn("{} of {} chunks of pull {} failed: {}", std::count(pull.ok.begin(), pull.ok.end(), false),
               pull.ok.size(), pull.order.pull, pull.what);
  PullOutcome outcome = parts_.core.locked([&](WorkerCore& core) {
    return core.pull_ended(pull.order.pull, std::move(pull.ok), std::move(pull.what), pull.in_frames);
  });
  pull.has_ended = true;
  growing_.erase(pull.order.pull);
  if (pull.has_runs()) outcome.checksums = std::move(pull.checksums);
  outcome.code = static_cast<std::uint8_t>(pull.code);
  outcome.path = pull.path;
  outcome.limit_mb_per_s = pull.limit_mb_per_s;
  outcome.num_in_frames = pull.num_in_frames;
  outcome.num_past_frames = pull.num_past_frames;
  outcome.host_why = std::move(pull.host_why);
  if (pull.arrived_at > 0) {
    // Transfers may end before the last one is submitted, but the last end comes after the last submit.
    outcome.post = pull.posted_at - pull.began;
    outcome.wire = std::max<TimeNs>(pull.arrived_at - pull.posted_at, 0);
    outcome.unpack = parts_.clock.now() - pull.arrived_at;
  }
  send_(seal(pull.order.pull, outcome));
}

}  // namespace kvferry
