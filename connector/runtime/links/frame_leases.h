// Leases on chunks that lie in the holder's GPU memory too: the workers pin the chunks' frames before the lease is
// answered, so that the reader can pull from frame to frame. Used by the scheduler node's thread alone.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "connector/runtime/links/node_wire.h"
#include "transport/base/clock.h"

namespace kvferry {

/// Lease answers that wait until the workers have pinned frames, and the leases for which frames may be pinned.
class FrameLeases {
 public:
  /// Returns true if transfers reach the frames of all ranks of a node.
  static bool has_frames(const std::vector<RankEndpoint>& ranks);

  /// Stores the answer, which leases chunks. Returns the order to send to each worker; the caller sets its `rank`. The
  /// pins end by themselves after `ttl`. At `patience_ends` the answer is ready without the frames of the ranks that
  /// have not reported by then.
  FramePinOrder begin(Asker asker, LeaseAnswer answer, TimeNs now, TimeNs ttl, TimeNs patience_ends);
  void take(const FramePinOutcome& outcome);
  /// Returns true if the workers were asked to pin frames for the lease, and must now unpin them.
  bool end(std::uint64_t lease) { return leases_.erase(lease) > 0; }

  struct Ready {
    Asker asker;
    LeaseAnswer answer;
  };
  /// Returns the answers that are complete, or whose `patience_ends` has passed. An answer does not have the chunks
  /// that lack slots (LeasedChunk::lacks_slots) and were not pinned in some rank's frame.
  std::vector<Ready> take_ready(TimeNs now);
  std::size_t num_leases() const { return leases_.size(); }

 private:
  struct Waiting {
    Ready ready;
    std::map<std::uint32_t, std::vector<std::uint32_t>> frames{};  // [rank][chunk] the pinned frame, or kNoFrame
    TimeNs deadline = 0;
  };
  std::map<std::uint64_t, Waiting> waiting_;  // [lease]
  std::map<std::uint64_t, TimeNs> leases_;    // [lease] time at which the workers' pins end without FrameUnpin
};

}  // namespace kvferry
