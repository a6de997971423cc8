// Purges: what a bad node gave is dropped by all nodes of its namespace, and nothing more is taken from it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "controller/directory/directory.h"
#include "transport/base/clock.h"
#include "transport/base/result.h"

namespace kvferry::controller {

/// Remembers what was purged, for nodes that register later. Pure: time is an argument. Threads: one at a time.
class Purges {
 public:
  struct Purge {
    std::uint64_t id = 0;
    std::string name_space, endpoint;
    Incarnation incarnation;  // the purged process; the largest number if none was known
    TimeNs ends_at = 0;
  };
  /// An order to node `to`. purge_id 0: KV of the endpoint is taken again.
  struct Order {
    NodeId to;
    std::uint64_t purge_id = 0;
    std::string endpoint;
  };

  /// `name`: the engine id of a registered node or of one that was lost, or an endpoint. Errors: kNotFound.
  Result<Purge> add(const Directory& directory, const std::string& name_space, const std::string& name, TimeNs now);
  /// Returns what the node that has registered is told. If it is a newer process at a purged endpoint, this purge ends,
  /// which all nodes are told.
  std::vector<Order> joined(const Directory& directory, NodeId node, TimeNs now);

 private:
  std::vector<Purge> purges_;  // the oldest first
  std::uint64_t last_id_ = 0;
};

}  // namespace kvferry::controller
