// Puller's deadlines, and its pulls of chunks that the holder still writes.
#include <utility>

#include "connector/runtime/worker/puller.h"

namespace kvferry {

void Puller::grow(const PullProgress& progress) {
  const auto found = growing_.find(progress.pull);
  if (found == growing_.end() || (!progress.is_settled && (progress.of == 0 || progress.done > progress.of))) return;
  const PullPtr pull = found->second;
  pull->grown_at = parts_.clock.now();
  const PullOrder& order = pull->order;
  const std::uint32_t rank = parts_.core.rank();
  const auto num_layers = static_cast<std::uint32_t>(parts_.layer_bytes.size());
  const std::uint32_t end = progress.is_settled ? num_layers : layers_of(progress.done, progress.of, num_layers);
  const bool is_lost = progress.is_settled && rank >= progress.checksums.size();
  Piece piece;
  piece.pull = pull;
  piece.address = order.remote_address;
  piece.remote_region = order.remote_frames;
  piece.is_in_frames = piece.is_growing = true;
  std::vector<std::size_t> ended;
  for (const std::uint32_t index : progress.items) {
    if (index >= pull->growths.size() || !pull->growths[index].is_open) continue;
    Pull::Growth& growth = pull->growths[index];
    const PullItem& item = order.items[index];
    if (pull->ok[index] && !is_lost && growth.layers < end) {
      const auto [offset, bytes] = parts_.layers(item.num_tokens, growth.layers, end);
      piece.ranges.push_back({growth.offset + offset, item.frames[rank] * order.remote_frame_bytes + offset, bytes});
      piece.items.push_back(index);
      pull->num_pieces[index] += 1;
      growth.layers = end;
    }
    if (!progress.is_settled) continue;
    pull->order.items[index].checksums = progress.checksums;
    ended.push_back(index);
  }
  if (!piece.items.empty()) {
    piece.region = parts_.store.frames()->region;
    submit(std::move(piece));
  }
  for (const std::size_t index : ended) close_growth(pull, index, !is_lost);
}

/// Ends the growth of a chunk, which ends when the transfers of its layers have ended; `ok` is false if it is lost.
void Puller::close_growth(const PullPtr& pull, std::size_t index, bool ok) {
  if (!std::exchange(pull->growths[index].is_open, false)) return;
  if (!ok) pull->ok[index] = false;
  LandedChunks landed;
  end_piece(pull, index, landed);
  if (!landed.empty()) parts_.store.landed(landed);
}

void Puller::progress() {
  if (!written_.chunks.empty()) {
    written_.rank = parts_.core.rank();
    send_(seal(0, std::exchange(written_, {})));
  }
  for (Piece& piece : std::exchange(waiting_, {})) submit(std::move(piece));
  const TimeNs now = parts_.clock.now();
  const std::vector<std::uint64_t> overdue =
      parts_.core.locked([&](WorkerCore& core) { return core.overdue_pulls(now); });
  for (const std::uint64_t pull : overdue) {
    for (auto& [id, piece] : running_) {
      if (piece.pull->order.pull != pull) continue;
      piece.pull->is_overdue = true;
      parts_.transport.cancel(id);
    }
    for (Piece& piece : std::exchange(waiting_, {})) {
      if (piece.pull->order.pull == pull)
        fail(piece, ErrorCode::kTimeout, "the transport had no room for another transfer until the deadline");
      else
        waiting_.push_back(std::move(piece));
    }
    if (const auto growing = growing_.find(pull); growing != growing_.end()) growing->second->grown_at = 0;
  }
  for (const auto& [id, pull] : std::map(growing_)) {
    if (now - pull->grown_at < kGrowthPause) continue;
    for (std::size_t i = 0; i < pull->growths.size(); ++i) close_growth(pull, i, false);
  }
  for (auto& [id, piece] : running_) {
    const Pull& pull = *piece.pull;
    const bool is_late =
        piece.is_in_frames && !piece.is_growing && now - pull.began >= pull.order.timeout_ms * kMillisecond / 2;
    if (is_late && !std::exchange(piece.is_given_up, true)) parts_.transport.cancel(id);
  }
}

}  // namespace kvferry
