// The nodes from which chunks came from frame to frame (GPU memory to GPU memory) when this node last pulled from them.
#pragma once

#include <cstddef>
#include <set>
#include <string>

namespace kvferry {

/// A lease request tells such a node that it may lease chunks that are not in its slots yet
/// (LeaseRequest::is_sure_of_frames). Whether frames can be reached is known to the workers alone, and a chunk that is
/// in frames only is lost for the pull if they can't.
class FrameHolders {
 public:
  /// Limit on the number of nodes, since a node is never removed while its frames are reached. At the limit all are
  /// removed, which costs one pull each.
  static constexpr std::size_t kMax = 512;

  bool contains(const std::string& endpoint) const { return endpoints_.contains(endpoint); }
  /// Records that every rank pulled chunks from this node's frames to its own, and none past them.
  void reached(const std::string& endpoint) {
    if (endpoints_.size() >= kMax) endpoints_.clear();
    endpoints_.insert(endpoint);
  }
  /// Records that some rank could not pull a chunk from this node's frames, or that the node did not lease a chunk.
  /// Returns true if the node's frames were reached before.
  bool missed(const std::string& endpoint) { return endpoints_.erase(endpoint) > 0; }
  std::size_t size() const { return endpoints_.size(); }

 private:
  std::set<std::string> endpoints_;
};

}  // namespace kvferry
