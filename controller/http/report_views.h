// The nodes' reports as the status page, `kvferry top` and `kvferry status` show them.
#pragma once

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "controller/api/status.h"

namespace kvferry::controller {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PathReport, peer, path, is_push, bytes, num_failed, gb_per_s, last_gb_per_s,
                                   limit_gb_per_s, best_gb_per_s, memory)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FailureReport, what, peer, ago_ms, cause)

constexpr std::uint64_t kReportStaleMs = 5000;  // a report that is older than this counts as stale

inline bool is_fresh(const NodeStatus& node) { return node.report && node.report_age_ms <= kReportStaleMs; }

/// Speeds at which a node receives from other nodes and sends to them.
struct Flow {
  double in_gb_per_s = 0, out_gb_per_s = 0;
};
/// Returns the flow of each node by its endpoint, from reports that are not stale. A transfer is reported by the node
/// that began it, and counts at its peer too.
std::map<std::string, Flow, std::less<>> flows_of(const Status& status);

/// Returns the node's report as JSON, or null if the node has sent none. The keys are the names of NodeReport's fields,
/// and also age_ms, is_stale and the names of Flow's fields.
nlohmann::json report_json(const NodeStatus& node, const Flow& flow);

}  // namespace kvferry::controller
