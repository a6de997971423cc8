// Checks of the paths between nodes: how fast each path is compared with its limit, and whether a better path should be
// used.
#pragma once

#include <string>
#include <vector>

#include "controller/api/status.h"
#include "launch/cli/doctor/finding.h"
#include "launch/cli/doctor/host_checks.h"

namespace kvferry::cli {

/// The transfers between two nodes in one direction, as reported by the node that began these transfers.
struct PathSpeed {
  std::string from{}, to{};  // names of the nodes, as ends_of() in node_rows.h returns them
  std::string path{};        // such as "shm" or "ucx/tcp"; empty: unknown
  bool is_push = false;
  double last_gb_per_s = 0, best_gb_per_s = 0, limit_gb_per_s = 0;  // see controller::PathReport
  double share = 0;  // best speed divided by the limit; 0: one of them is not known
};

/// Returns the paths over which bytes went: those with the smallest share first, those whose share is unknown last.
std::vector<PathSpeed> path_speeds(const controller::Status& status);

std::vector<std::string> path_check_names();
/// Checks the paths that the status has. `host`: the host on which this process runs.
std::vector<Finding> examine_paths(const controller::Status& status, const Host& host);

}  // namespace kvferry::cli
