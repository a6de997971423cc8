#include "connector/core/leased_frames.h"

#include <utility>

namespace kvferry {

std::vector<std::uint32_t> LeasedFrames::begin(std::uint64_t lease, std::span<const ChunkRef> chunks, TimeNs until) {
  end(lease);
  std::vector<std::uint32_t> frames(chunks.size(), kNoFrame);
  Lease made;
  made.until = until;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    if (num_pinned_ >= table_.num_frames() / 2) break;
    const auto frame = table_.find(chunks[i]);
    if (!frame) continue;
    made.pins.push_back(table_.pin(*frame, "lease " + std::to_string(lease)));
    table_.touch(*frame);
    frames[i] = frame->frame;
    ++num_pinned_;
  }
  if (!made.pins.empty()) leases_.emplace(lease, std::move(made));
  return frames;
}

void LeasedFrames::end(std::uint64_t lease) {
  if (const auto found = leases_.find(lease); found != leases_.end()) end(found);
}

LeasedFrames::Leases::iterator LeasedFrames::end(Leases::iterator lease) {
  for (const FramePin pin : lease->second.pins) table_.unpin(pin);
  num_pinned_ -= lease->second.pins.size();
  return leases_.erase(lease);
}

void LeasedFrames::expire(TimeNs now) {
  for (auto lease = leases_.begin(); lease != leases_.end();)
    lease = lease->second.until <= now ? end(lease) : std::next(lease);
}

}  // namespace kvferry
