// Leases and pulls on the scheduler node's thread. LeaseLinks asks other nodes for leases, answers the lease requests
// of other nodes, and orders this engine's workers to pull. A part of NodeLinks, which owns the sockets.
#pragma once

#include <string>
#include <vector>

#include "connector/runtime/links/frame_leases.h"
#include "connector/runtime/links/link_parts.h"
#include "connector/runtime/links/shapes.h"

namespace kvferry {

/// Not thread-safe: only the thread of NodeLinks uses it.
class LeaseLinks {
 public:
  explicit LeaseLinks(const LinkParts& parts) : parts_(parts) {}

  void execute(RequestLease& wanted);
  void execute(ReleaseLease& released);
  void execute(StartPull& wanted);
  void execute(GrowPull& wanted);

  void requested(Asker asker, LeaseRequest request);
  void released(const LeaseRelease& lease);
  void answered(const std::string& endpoint, std::uint64_t fetch, LeaseAnswer answer);
  void pulled(const PullOutcome& outcome);
  void slots_written(const SlotsWritten& slots);
  void hashed(const ChecksumOutcome& outcome) { run_checksums_.take(outcome); }
  void pinned(const FramePinOutcome& outcome) { frames_.take(outcome); }

  /// Answers the lease requests that can be answered now. Returns true if one of these answers had waited for the
  /// workers.
  bool progress();
  /// Returns true if a request waits for chunks that are being saved or copied to their slots.
  bool is_waiting() const { return !waiting_.empty(); }

 private:
  struct Request {
    Asker asker;
    LeaseRequest request;
    TimeNs deadline = 0;  // time at which the request is answered without the chunks that are still being saved
  };
  /// Returns true if the request names a hand-off or an announced push, and one of the requested chunks is still being
  /// saved or copied from GPU memory to its slot, so that the reader can't pull it. The caller must hold the core's
  /// lock.
  bool is_being_saved(const SchedulerCore& core, const LeaseRequest& request) const;
  void answer(Request request);
  bool wants_frames(const LeaseRequest& request) const;
  void send(const Asker& asker, LeaseAnswer answer);

  const LinkParts& parts_;
  std::vector<Shard> shards_ = shards_of(parts_.ranks);           // [rank]
  std::vector<ShardParts> shard_parts_ = parts_of(parts_.ranks);  // [rank]; empty: `shards_` says all
  RunChecksums run_checksums_{shards_, shard_parts_};
  FrameLeases frames_;
  std::vector<Request> waiting_;
};

}  // namespace kvferry
