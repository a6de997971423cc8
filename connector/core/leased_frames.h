// The frames that are pinned for leases: another node reads a leased chunk from its frame, so the frame is not reused
// until the lease ends.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "connector/core/frame_table.h"
#include "connector/core/peer_wire.h"
#include "transport/base/clock.h"

namespace kvferry {

class LeasedFrames {
 public:
  /// `table` must outlive this object.
  explicit LeasedFrames(FrameTable& table) : table_(table) {}

  /// Pins the frames that have these chunks, verified, until end() or `until`: clean frames, and those that are being
  /// copied to their slots. Where are_growing[i] is true, also the frame into which a save packs chunk i, of which the
  /// reader reads what is announced (LeasedChunk::is_growing). Returns for each chunk its pinned frame, or
  /// kNoFrame. An eighth of all frames, and at least one frame, is never pinned for leases, so that saves and loads
  /// find frames. If the lease has pins already, these end first.
  std::vector<std::uint32_t> begin(std::uint64_t lease, std::span<const ChunkRef> chunks, TimeNs until,
                                   const std::vector<bool>& are_growing = {});
  /// Ends a lease's pins. A lease that is not known, or has expired, is ignored.
  void end(std::uint64_t lease);
  /// Ends the pins of all leases whose time has passed.
  void expire(TimeNs now);

  std::size_t num_pinned() const { return num_pinned_; }

 private:
  struct Lease {
    std::vector<FramePin> pins;
    TimeNs until = 0;
  };
  using Leases = std::map<std::uint64_t, Lease>;
  Leases::iterator end(Leases::iterator lease);

  FrameTable& table_;
  Leases leases_;
  std::size_t num_pinned_ = 0;
};

inline std::vector<std::uint32_t> LeasedFrames::begin(std::uint64_t lease, std::span<const ChunkRef> chunks,
                                                      TimeNs until, const std::vector<bool>& are_growing) {
  end(lease);
  std::vector<std::uint32_t> frames(chunks.size(), kNoFrame);
  const std::size_t kept_free = std::max<std::size_t>(table_.num_frames() / 8, 1);
  Lease made;
  made.until = until;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    if (num_pinned_ + kept_free >= table_.num_frames()) break;
    auto frame = table_.find_whole(chunks[i]);
    if (!frame && i < are_growing.size() && are_growing[i]) frame = table_.find_growing(chunks[i]);
    if (!frame) continue;
    made.pins.push_back(table_.pin(*frame, "lease " + std::to_string(lease)));
    table_.touch(*frame);
    frames[i] = frame->frame;
    ++num_pinned_;
  }
  if (!made.pins.empty()) leases_.emplace(lease, std::move(made));
  return frames;
}

inline void LeasedFrames::end(std::uint64_t lease) {
  if (const auto found = leases_.find(lease); found != leases_.end()) end(found);
}

inline LeasedFrames::Leases::iterator LeasedFrames::end(Leases::iterator lease) {
  for (const FramePin pin : lease->second.pins) table_.unpin(pin);
  num_pinned_ -= lease->second.pins.size();
  return leases_.erase(lease);
}

inline void LeasedFrames::expire(TimeNs now) {
  for (auto lease = leases_.begin(); lease != leases_.end();)
    lease = lease->second.until <= now ? end(lease) : std::next(lease);
}

}  // namespace kvferry
