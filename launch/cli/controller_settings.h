// The settings of `kvferry controller`, and the two settings of commands that connect to a controller. To add a setting
// of the controller, add a field to ControllerConfig and a row to make_controller_settings().
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "controller/api/endpoint.h"
#include "controller/scale/replica.h"
#include "transport/base/net/host_port.h"
#include "transport/base/settings.h"

namespace kvferry::cli {

constexpr std::int64_t kControllerTimeoutMs = 2000;  // time that a command waits for the controller's answer

/// The values of the settings of `kvferry controller`. An empty string means that the default applies, which the text
/// passed to with_shown_default() describes.
struct ControllerConfig {
  std::string bind = "tcp://127.0.0.1:14600";
  std::string stream = "none";
  std::string http = "none";
  std::string http_cert_file;
  std::string http_key_file;
  std::string state;
  std::string etcd;
  std::string event_log;
  std::string replica;
  std::string advertise;
  std::int64_t lease_ms = 2500;
  std::string cluster_key_file;
  bool insecure = false;
};

/// Returns a function that checks whether a value is an endpoint for `use`, or the word `or_word`.
std::function<bool(const std::string&)> is_endpoint(controller::EndpointUse use,
                                                    std::optional<std::string_view> or_word = {});
bool is_replica_name(const std::string& value);
inline constexpr const char* kKeyFileAllowed = "the path of a file of 32 to 65536 bytes with mode 0600 or 0400";

/// Makes the table that controller_settings() returns, in the order in which the documentation lists the settings.
inline std::vector<Setting<ControllerConfig>> make_controller_settings() {
  using C = ControllerConfig;
  using controller::EndpointUse;
  return {
      setting<C, std::string>("bind", &C::bind,
                              "tcp://HOST:PORT with a port of 0 to 65535 (0: any free port), or ipc://PATH",
                              "Endpoint at which the controller listens for nodes and commands, over ZeroMQ",
                              is_endpoint(EndpointUse::kBind)),
      setting<C, std::string>("stream", &C::stream,
                              fmt::format("none, {}", controller::allowed_endpoints(EndpointUse::kBindStream)),
                              "Second endpoint at which the controller listens, with less latency than ZeroMQ",
                              is_endpoint(EndpointUse::kBindStream, "none")),
      setting<C, std::string>(
          "http", &C::http, "none, or HOST:PORT with a port of 0 to 65535 (0: any free port)",
          "Where to serve metrics, a status page and routers' queries; with a cluster key, only to clients "
          "that have a token (kvferry token)",
          [](const std::string& value) { return value == "none" || net::parse_host_port(value); }),
      setting("http-cert-file", &C::http_cert_file, "the path of a PEM file",
              "Certificate, followed by those that lead to its authority: --http then speaks only HTTPS (TLS 1.3). A "
              "renewed file is used within a second")
          .with_shown_default("none: HTTP is not encrypted"),
      setting("http-key-file", &C::http_key_file, "the path of a PEM file without a password",
              "Private key of the certificate in --http-cert-file")
          .with_shown_default("none"),
      setting("state", &C::state, "a folder, or 'none'",
              "Folder of the state that survives a restart; with 'none', nodes publish their chunks again after "
              "a restart")
          .with_shown_default(
              "${XDG_STATE_HOME:-~/.local/state}/kvferry/controller-PORT; none if --bind has port 0 or ipc://"),
      // The values of etcd and event-log may contain passwords. The table does not check them, because its error
      // messages quote the value; parse_etcd_url() and parse_redis_url() check them and leave the value out.
      setting(
          "etcd", &C::etcd, "http://HOST:PORT[,...][/PREFIX]",
          "The etcd cluster through which several replicas find each other and share quotas: its members, separated by "
          "commas, optionally followed by a prefix for all keys")
          .with_shown_default("none; the prefix of the keys is /kvferry"),
      setting("event-log", &C::event_log, "redis://HOST[:PORT][/DB][?stream=NAME&bytes=N]",
              "Stream of Redis or Valkey from which replicas that start later read what nodes published before")
          .with_shown_default(
              "none; a URL without stream and bytes means the stream kvferry:events of up to 268435456 bytes"),
      setting<C, std::string>("replica", &C::replica, "a name of up to 128 printable ASCII characters without spaces",
                              "Name of this replica, which must stay the same over restarts", is_replica_name)
          .with_shown_default("HOST:PORT of --advertise"),
      setting<C, std::string>("advertise", &C::advertise, "tcp://HOST:PORT with a port of 1 to 65535, or ipc://PATH",
                              "Where nodes reach this replica", is_endpoint(EndpointUse::kConnect, ""))
          .with_shown_default("the endpoint of --bind"),
      setting<C, std::int64_t>(
          "lease-ms", &C::lease_ms, "an integer from 1000 to 600000",
          "A node that is silent for this long is removed, with its chunks; nodes send a heartbeat every 500 ms",
          [](std::int64_t ms) { return ms >= 1000 && ms <= 600'000; }),
      setting("cluster-key-file", &C::cluster_key_file, kKeyFileAllowed,
              "File with the key of the deployment (kvferry keygen): a tcp:// endpoint of --bind then accepts only "
              "encrypted connections of clients that have the key, and --http requires a token")
          .with_shown_default("none"),
      setting("insecure", &C::insecure, "true or false; on the command line, the flag without a value means true",
              "Whether the controller starts without a cluster key although other hosts can reach it: each host can "
              "then register nodes and clear the chunks of other nodes"),
  };
}

std::span<const Setting<ControllerConfig>> controller_settings();

/// The settings that the user gave as flags; parsing the command line fills them in.
using SettingFlags = std::vector<SettingEntry>;

/// Adds a flag for each row of the table; `flags` gets the values that the user gives.
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

/// Returns each setting's value from the first source that has it: the flags, the environment, the file, the defaults.
Result<ControllerConfig> read_controller_settings(const SettingFlags& flags,
                                                  const std::optional<std::string>& config_file);

/// The controller that a command connects to.
struct ControllerAddress {
  std::string endpoint;
  std::optional<net::ClusterKey> key;
};
/// Adds `--controller` and `--cluster-key-file`; KVFERRY_CONTROLLER and KVFERRY_CLUSTER_KEY_FILE also set them.
void add_controller_option(CLI::App& command, SettingFlags& flags);
/// Returns the controller that a flag or an environment variable sets, by default tcp://127.0.0.1:14600. Errors:
/// kInvalidArgument if its endpoint is malformed; those of net::read_cluster_key().
Result<ControllerAddress> controller_of(const SettingFlags& flags);

/// Returns the folder of the controller's state, or an empty text if the controller keeps no state.
std::string state_folder(const ControllerConfig& config);
/// Returns the options of a controller with replicas, nullopt if the settings name neither etcd nor an event log. The
/// controller listens at `endpoint`. Errors: kInvalidArgument if a URL can't be parsed, or if the setting `advertise`
/// is missing and `endpoint` has a wildcard address, such as tcp://*, to which nodes can't connect.
Result<std::optional<controller::scale::ReplicaOptions>> replica_options(const ControllerConfig& config,
                                                                         const std::string& endpoint);

}  // namespace kvferry::cli
