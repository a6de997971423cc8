// Nodes from which a fetch has failed. Nothing is fetched from such a node for a while, because a node whose workers
// are behind a firewall may grant every lease and never deliver a byte.
#pragma once

#include <map>
#include <string>

#include "transport/base/clock.h"

namespace kvferry {

/// A circuit breaker for each endpoint. The first failure blocks fetches from a node for kPauseMin, and each failure
/// after a pause blocks them for twice as long as the previous pause, at most for kPauseMax. After a pause only one
/// fetch at a time tries the node, until a fetch succeeds.
class SuspectNodes {
 public:
  static constexpr TimeNs kPauseMin = 5 * kSecond, kPauseMax = 60 * kSecond;
  static constexpr TimeNs kExpiresAfter = 600 * kSecond;  // a node is removed this long after its last pause

  /// `try_time`: while one fetch tries a node, other fetches from the node are blocked for at most this time.
  explicit SuspectNodes(TimeNs try_time) : try_time_(try_time) {}

  /// Returns false while nothing may be fetched from this node.
  bool allows(const std::string& endpoint, TimeNs now) const;
  /// Must be called whenever a fetch asks this node.
  void asked(const std::string& endpoint, TimeNs now);
  /// Records that the node answered but had nothing to fetch, so that another fetch may try the node.
  void had_nothing(const std::string& endpoint);
  void succeeded(const std::string& endpoint) { nodes_.erase(endpoint); }
  /// Blocks fetches from the node. Returns the length of the pause, 0 if an earlier failure blocks the fetches already.
  TimeNs failed(const std::string& endpoint, TimeNs now);
  void tick(TimeNs now);

 private:
  struct Node {
    TimeNs pause = 0;
    TimeNs closed_until = 0;
    TimeNs tried_until = 0;  // limit on the wait for the outcome of the fetch that tries the node
  };
  TimeNs try_time_;
  std::map<std::string, Node> nodes_;  // [endpoint]
};

}  // namespace kvferry
