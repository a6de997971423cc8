// Which other workers' frames of GPU memory this worker can pull from. After a path has failed, it is not used for
// kPause: the other worker's chunks are then pulled through host memory.
#pragma once

#include <map>
#include <string>

#include "connector/runtime/worker/transport_peers.h"
#include "connector/runtime/worker/worker_parts.h"

namespace kvferry {

/// Used by the service thread alone.
class FramePaths {
 public:
  static constexpr TimeNs kPause = 30 * kSecond;

  FramePaths(const WorkerParts& parts, TransportPeers& peers) : parts_(parts), peers_(peers) {}

  /// Returns ok if a path that is not paused leads from these frames of another worker to the frames here. The error's
  /// text is the reason, for logs and reports.
  Result<void> check(const std::string& address, const std::string& remote_frames) {
    const TimeNs now = parts_.clock.now();
    std::erase_if(pauses_, [&](const auto& pause) { return pause.second.until <= now; });
    if (const auto pause = pauses_.find(address); pause != pauses_.end())
      return Error{ErrorCode::kUnavailable, pause->second.why};
    const auto frames = parts_.store.frames();
    if (!frames) return Error{ErrorCode::kUnavailable, "no transfer path reaches this worker's pool in GPU memory"};
    KVFERRY_TRY(peers_.path_between(address, frames->region, remote_frames));
    return {};
  }
  void failed(const std::string& address, const std::string& why) {
    pauses_[address] = {parts_.clock.now() + kPause, why};
  }

 private:
  struct Pause {
    TimeNs until = 0;
    std::string why;
  };
  const WorkerParts& parts_;
  TransportPeers& peers_;
  std::map<std::string, Pause> pauses_;  // [address of the worker's transport]
};

}  // namespace kvferry
