// The settings of `kvferry controller`, and of the commands that talk to one.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "controller/scale/replica.h"
#include "transport/base/settings.h"

namespace kvferry::cli {

/// The settings of `kvferry controller`. Empty texts stand for defaults that follow from other settings.
struct ControllerConfig {
  std::string bind = "tcp://127.0.0.1:14600";
  std::string stream = "none";
  std::string http = "none";
  std::string state;
  std::string etcd;
  std::string event_log;
  std::string replica;
  std::string advertise;
};
std::span<const Setting<ControllerConfig>> controller_settings();

/// The flags of a command line, filled while it is parsed.
using SettingFlags = std::vector<SettingEntry>;

/// Adds a flag for each row of the table.
template <class Options>
void add_setting_options(CLI::App& command, std::span<const Setting<Options>> table, SettingFlags& flags) {
  for (const Setting<Options>& row : table) {
    const std::string key(row.key);
    command.add_option_function<std::string>(
        "--" + key,
        [&flags, key](const std::string& value) {
          flags.push_back({key, {value}, "--" + key});
        },
        fmt::format("{}: {} [{}]", row.help, row.allowed, default_text(row)));
  }
}

/// The settings in force: flags, then the environment, then the file, then the defaults.
Result<ControllerConfig> read_controller_settings(const SettingFlags& flags,
                                                  const std::optional<std::string>& config_file);

/// Adds `--controller`, the controller that a command talks to; also KVFERRY_CONTROLLER.
void add_controller_option(CLI::App& command, SettingFlags& flags);
/// kInvalidArgument: the value is not an endpoint.
Result<std::string> controller_of(const SettingFlags& flags);

/// The folder of the controller's state; empty: the controller keeps none.
std::string state_folder(const ControllerConfig& config);
/// What makes the controller one of several replicas; nullopt if it is the only one. `endpoint`: where it listens.
/// kInvalidArgument: an address that can't be parsed, or none at which others can reach the replica.
Result<std::optional<controller::scale::ReplicaOptions>> replica_options(const ControllerConfig& config,
                                                                         const std::string& endpoint);

}  // namespace kvferry::cli
