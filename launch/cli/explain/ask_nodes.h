// Asks nodes what their flight recorders have of requests.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "connector/core/flight_recorder.h"
#include "connector/runtime/links/node_wire.h"
#include "controller/api/status.h"
#include "transport/base/clock.h"
#include "transport/base/net/cluster_key.h"

namespace kvferry::cli {

struct NodeAnswer {
  std::string engine_id, role, endpoint;
  bool has_answered = false;
  /// Time on this process's clock to which the ages of the events count back: the middle between question and answer,
  /// so that the hosts' clocks need not agree.
  TimeNs at = 0;
  std::vector<RequestLife> lives{};
  TimeNs error = 0;                     // limit on the error of `at`: half of the time between question and answer
  std::optional<TimeNs> clock_ahead{};  // how far the host's clock is ahead of this one's; none: the node didn't tell
};

/// Asks all nodes, and waits up to `timeout` for each few hundred of them. Returns an answer for each node, in order.
std::vector<NodeAnswer> ask_nodes(const std::vector<controller::NodeStatus>& nodes, const LivesRequest& request,
                                  const std::optional<net::ClusterKey>& key, TimeNs timeout);

}  // namespace kvferry::cli
