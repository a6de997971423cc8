// Checks of a running deployment, as its controller and this host see it.
#pragma once

#include <string>
#include <vector>

#include "launch/cli/controller_settings.h"
#include "launch/cli/doctor/finding.h"
#include "launch/cli/doctor/host_checks.h"
#include "launch/cli/doctor/path_checks.h"

namespace kvferry::cli {

std::vector<std::string> deployment_check_names();
struct DeploymentReport {
  std::vector<Finding> findings{};
  std::vector<PathSpeed> speeds{};
};
/// Checks the deployment. Blocks for up to 2 seconds until the controller answers, and for up to 1.5 seconds for each
/// address of a node or of its server that does not answer; resolving names takes more time. If the status can't be
/// fetched, the error is the only finding. `host`: the host on which this process runs.
DeploymentReport examine_deployment(const ControllerAddress& controller, const Host& host);

}  // namespace kvferry::cli
