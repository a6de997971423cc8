#include "sim_frames.h"

namespace kvferry::sim {

bool Frames::write(ChunkRef chunk, FrameTable::State purpose, const std::vector<Stamp>& stamps,
                   std::uint64_t checksum) {
  const auto reserved = table_.reserve(chunk, purpose, "a chunk that is written to its slot");
  if (!reserved) return false;
  stamps_[reserved->frame.frame] = stamps;
  table_.filled(reserved->frame);
  table_.write_back_started(reserved->frame);
  table_.hashed(reserved->frame, checksum);
  writing_back_.emplace(chunk, *reserved);
  return true;
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
