// The settings of `kvferry controller`, and of the commands that connect to a controller.
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
  std::string cluster_key_file;
  bool insecure = false;
};
std::span<const Setting<ControllerConfig>> controller_settings();

/// The settings given as flags; parsing the command line fills them in.
using SettingFlags = std::vector<SettingEntry>;

/// Adds a flag for each row of the table.
template <class Options>
void add_setting_options(CLI::App& command, std::span<const Setting<Options>> table, SettingFlags& flags) {
  for (const Setting<Options>& row : table) {
    const std::string key(row.key);
    if (std::holds_alternative<bool>(row.get(Options{}))) {
      command.add_flag_callback(
          "--" + key,
          [&flags, key] {
            flags.push_back({key, {"true"}, "--" + key});
          },
          row.help);
      continue;
    }
    command.add_option_function<std::string>(
        "--" + key,
        [&flags, key](const std::string& value) {
          flags.push_back({key, {value}, "--" + key});
        },
        fmt::format("{}: {} [{}]", row.help, row.allowed, default_text(row)));
  }
}

/// Returns each setting's value from the first that has one: the flags, the environment, the file, the defaults.
Result<ControllerConfig> read_controller_settings(const SettingFlags& flags,
                                                  const std::optional<std::string>& config_file);

/// The controller that a command connects to.
struct ControllerAddress {
  std::string endpoint;
  std::optional<net::ClusterKey> key;
};
/// Adds `--controller` and `--cluster-key-file`; KVFERRY_CONTROLLER and KVFERRY_CLUSTER_KEY_FILE also set them.
void add_controller_option(CLI::App& command, SettingFlags& flags);
/// Returns what add_controller_option() added. kInvalidArgument: the controller is not an endpoint; the errors of
/// net::read_cluster_key().
Result<ControllerAddress> controller_of(const SettingFlags& flags);

/// Returns the folder of the controller's state; empty: the controller keeps no state.
std::string state_folder(const ControllerConfig& config);
/// Returns the options of a controller with replicas; nullopt if it has none. `endpoint`: where the controller listens.
/// kInvalidArgument: an address can't be parsed, or there is none at which other machines reach this replica.
Result<std::optional<controller::scale::ReplicaOptions>> replica_options(const ControllerConfig& config,
                                                                         const std::string& endpoint);

}  // namespace kvferry::cli
