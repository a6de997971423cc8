// Purges: all nodes of a namespace drop the chunks that came from a bad node or member, and accept no more from it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "controller/api/admin_command.h"
#include "controller/directory/directory.h"
#include "transport/base/clock.h"
#include "transport/base/result.h"

namespace kvferry::controller {

/// Remembers purges for up to 24 hours, at most 128 at a time, for nodes that register later. Pure: time is an
/// argument. Threads: one at a time.
class Purges {
 public:
  struct Purge {
    std::uint64_t id = 0;
    std::string name_space;
    std::string giver;  // endpoint of a node, or "member:NAME"
    // Incarnation of the purged process, of a member the newest one of its nodes; the largest number if it is not
    // known.
    Incarnation incarnation;
    TimeNs ends_at = 0;
    bool has_successor = false;  // true if a newer process has registered, whose chunks nodes accept

    bool is_of_member() const { return giver.starts_with(kMemberPrefix); }
    bool is_of(const NodeInfo& info) const;
  };
  /// An order to node `to`. purge_id 0: the node may accept chunks from the giver again.
  struct Order {
    NodeId to;
    std::uint64_t purge_id = 0;
    std::string giver;
  };

  /// Adds a purge of `name`: "member:NAME", the engine id of a registered node or of one lost in the last ten minutes,
  /// or an endpoint. kNotFound: `name` is none of these.
  Result<Purge> add(const Directory& directory, const std::string& name_space, const std::string& name, TimeNs now);
  /// Returns the orders that the registration of `node` causes: the purges of its namespace, to this node. If the node
  /// is a newer process at a purged endpoint or of a purged member, all nodes of the namespace get an order with
  /// purge_id 0 instead, and nodes that register later get it after the purge.
  std::vector<Order> joined(const Directory& directory, NodeId node, TimeNs now);

 private:
  std::vector<Purge> purges_;  // the oldest first
  std::uint64_t last_id_ = 0;
};

}  // namespace kvferry::controller
