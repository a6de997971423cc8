#include "sim_frames.h"

namespace kvferry::sim {

void Frames::save(ChunkRef chunk, const std::vector<Stamp>& stamps) {
  const auto reserved = table_.reserve(chunk, FrameTable::State::kGathering, "save");
  if (!reserved) return;
  stamps_[reserved->frame.frame] = stamps;
  table_.filled(reserved->frame);
  table_.write_back_started(reserved->frame);
  table_.written_back(reserved->frame);
  table_.unpin(reserved->pin);
}

bool Frames::land(ChunkRef chunk, const std::vector<Stamp>& stamps, std::uint64_t checksum) {
  const auto reserved = table_.reserve(chunk, FrameTable::State::kLanding, "landing");
  if (!reserved) return false;
  stamps_[reserved->frame.frame] = stamps;
  table_.filled(reserved->frame);
  table_.hashed(reserved->frame, checksum);
  table_.write_back_started(reserved->frame);
  landing_.emplace(chunk, *reserved);
  return true;
}

void Frames::landed(ChunkRef chunk, bool ok) {
  const auto landing = landing_.extract(chunk);
  if (!landing) throw Broken("exactly-once: the copy of a chunk from its frame ends twice");
  const FrameTable::Reserved& reserved = landing.mapped();
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
