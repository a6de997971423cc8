// Which controller a command talks to.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "launch/cli/settings.h"

namespace kvferry::cli {

/// `--controller`, or KVFERRY_CONTROLLER.
void add_controller_option(CLI::App& command, Values& flags);
/// kInvalidArgument: it is not an endpoint.
Result<std::string> controller_of(const Values& flags);

}  // namespace kvferry::cli
