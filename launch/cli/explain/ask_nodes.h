// Asks nodes for the events of requests in their flight recorders.
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
  /// Time on this process's clock at which the node answered, estimated as the middle between sending the question and
  /// receiving the answer. An event happened at this time minus its age, so the hosts' clocks need not agree.
  TimeNs at = 0;
  std::vector<RequestLife> lives{};
  TimeNs error = 0;                     // limit on the error of `at`: half of the time between question and answer
  std::optional<TimeNs> clock_ahead{};  // how far the node's wall clock is ahead of this host's, if known
};

/// Asks all nodes, in groups of kPeersMax, and waits up to `timeout` for the answers of each group. Returns an element
/// for each node, in the order of `nodes`; has_answered is false for nodes that did not answer.
std::vector<NodeAnswer> ask_nodes(const std::vector<controller::NodeStatus>& nodes, const LivesRequest& request,
                                  const std::optional<net::ClusterKey>& key, TimeNs timeout);

}  // namespace kvferry::cli
