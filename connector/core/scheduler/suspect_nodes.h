// The nodes from which nothing could be fetched, which are left alone for a while: a node behind a firewall answers
// every request for a lease and never delivers a byte. Pure.
#pragma once

#include <map>
#include <string>

#include "transport/base/clock.h"

namespace kvferry {

/// A circuit breaker for each endpoint. The first failure closes a node off for kPauseMin, each further one for twice
/// as long, at most kPauseMax. After a pause one fetch at a time tries the node, until one succeeds.
class SuspectNodes {
 public:
  static constexpr TimeNs kPauseMin = 5 * kSecond, kPauseMax = 60 * kSecond;
  static constexpr TimeNs kExpiresAfter = 600 * kSecond;  // without a fetch that failed

  /// `try_time`: how long a fetch may take, and so keeps the other ones waiting for its outcome.
  explicit SuspectNodes(TimeNs try_time) : try_time_(try_time) {}

  /// Returns false while nothing may be fetched from this node.
  bool allows(const std::string& endpoint, TimeNs now) const;
  /// To be called with each fetch that begins.
  void asked(const std::string& endpoint, TimeNs now);
  /// The node answered, and there was nothing to fetch: another fetch may try it.
  void had_nothing(const std::string& endpoint);
  void succeeded(const std::string& endpoint) { nodes_.erase(endpoint); }
  /// Closes the node off and returns for how long; 0: it is closed off already, because an earlier fetch failed.
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
