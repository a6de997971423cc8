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
/// Checks the deployment. Blocks for up to three seconds for each node that does not answer. If the controller does not
/// answer, that is a finding too. `host`: the host on which this process runs.
DeploymentReport examine_deployment(const ControllerAddress& controller, const Host& host);

}  // namespace kvferry::cli
