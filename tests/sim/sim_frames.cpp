#include "sim_frames.h"

#include <algorithm>

namespace kvferry::sim {

bool Frames::write(ChunkRef chunk, FrameTable::State purpose, const std::vector<Stamp>& stamps,
                   std::uint64_t checksum) {
  if (!begin(chunk, purpose, stamps.size())) return false;
  put(chunk, 0, stamps);
  end(chunk, true, checksum);
  return true;
}

bool Frames::begin(ChunkRef chunk, FrameTable::State purpose, std::size_t num_stamps) {
  const auto reserved = table_.reserve(chunk, purpose, "a chunk that is written to its slot");
  if (!reserved) return false;
  stamps_[reserved->frame.frame].resize(num_stamps);
  num_filled_[reserved->frame.frame] = 0;
  filling_.emplace(chunk, *reserved);
  return true;
}

void Frames::put(ChunkRef chunk, std::size_t first, std::span<const Stamp> stamps) {
  const std::uint32_t frame = filling_.at(chunk).frame.frame;
  std::ranges::copy(stamps, stamps_[frame].begin() + static_cast<std::ptrdiff_t>(first));
  num_filled_[frame] = std::max(num_filled_[frame], first + stamps.size());
}

void Frames::end(ChunkRef chunk, bool ok, std::uint64_t checksum) {
  const auto filled = filling_.extract(chunk);
  if (!filled) throw Broken("exactly-once: what fills a frame ends twice");
  const FrameTable::Reserved& reserved = filled.mapped();
  if (!ok) {
    table_.drop(reserved.frame);
    table_.unpin(reserved.pin);
    return;
  }
  table_.filled(reserved.frame);
  table_.write_back_started(reserved.frame);
  table_.hashed(reserved.frame, checksum);
  writing_back_.emplace(chunk, reserved);
}

void Frames::written_back(ChunkRef chunk, bool ok) {
  const auto writing = writing_back_.extract(chunk);
  if (!writing) throw Broken("exactly-once: the copy of a chunk from its frame ends twice");
  const FrameTable::Reserved& reserved = writing.mapped();
  if (ok)
    table_.written_back(reserved.frame);
  else
    table_.drop(reserved.frame);
  table_.unpin(reserved.pin);
}

const std::vector<Stamp>* Frames::find(ChunkRef chunk) const {
  const auto frame = table_.find_whole(chunk);
  return frame ? &stamps_[frame->frame] : nullptr;
}

}  // namespace kvferry::sim
