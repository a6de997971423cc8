// Checks of a running deployment, as its controller and this host see it.
#pragma once

#include <string>
#include <vector>

#include "launch/cli/controller_settings.h"
#include "launch/cli/doctor/finding.h"

namespace kvferry::cli {

std::vector<std::string> deployment_check_names();
/// Checks the deployment. Blocks for up to three seconds for each node that does not answer. If the controller does not
/// answer, that is a finding too.
std::vector<Finding> examine_deployment(const ControllerAddress& controller);

}  // namespace kvferry::cli
