// The frames that are pinned for leases: another node reads a leased chunk from its frame, so the frame is not reused
// until the lease ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "connector/core/frame_table.h"
#include "connector/core/peer_wire.h"
#include "transport/base/clock.h"

namespace kvferry {

class LeasedFrames {
 public:
  /// `table` must outlive this object.
  explicit LeasedFrames(FrameTable& table) : table_(table) {}

  /// Pins the clean frames of these chunks until end() or `until`, and returns [chunk] the frame or kNoFrame. At most
  /// half of all frames are pinned at a time, so that saves and loads always find others. A lease that has pins already
  /// ends first.
  std::vector<std::uint32_t> begin(std::uint64_t lease, std::span<const ChunkRef> chunks, TimeNs until);
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

}  // namespace kvferry
