// The settings of `kvferry controller`.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "controller/scale/replica.h"
#include "launch/cli/settings.h"

namespace kvferry::cli {

/// A setting and its line in `--help`.
struct ControllerSetting {
  Setting setting;
  std::string help;
};
std::span<const ControllerSetting> controller_settings();

/// The folder that keeps the state; empty: nothing is kept.
std::string state_folder(const Values& values);
/// What makes it one of several; nullopt: it is alone. `endpoint`: where it listens in fact.
/// kInvalidArgument: an address that can't be read, or none that others can reach.
Result<std::optional<controller::scale::ReplicaOptions>> replica_options(const Values& values,
                                                                         const std::string& endpoint);

}  // namespace kvferry::cli
