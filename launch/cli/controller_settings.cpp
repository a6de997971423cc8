#include "launch/cli/controller_settings.h"

#include <algorithm>
#include <cstdlib>

#include "transport/base/log.h"
#include "transport/base/wall_clock.h"

namespace kvferry::cli {
namespace {

struct ClientConfig {
  std::string controller = "tcp://127.0.0.1:14600";
  std::string cluster_key_file;
};

std::span<const Setting<ClientConfig>> client_settings() {
  using C = ClientConfig;
  static const Setting<C> settings[] = {
      setting<C, std::string>("controller", &C::controller,
                              std::string(controller::allowed_endpoints(controller::EndpointUse::kConnect)),
                              "Endpoint of the controller (environment variable KVFERRY_CONTROLLER)",
                              is_endpoint(controller::EndpointUse::kConnect)),
      setting("cluster-key-file", &C::cluster_key_file, kKeyFileAllowed,
              "File with the key of the controller's deployment (environment variable KVFERRY_CLUSTER_KEY_FILE)")
          .with_shown_default("none")};
  return settings;
}

}  // namespace

std::function<bool(const std::string&)> is_endpoint(controller::EndpointUse use,
                                                    std::optional<std::string_view> or_word) {
  return [=](const std::string& value) { return value == or_word || controller::check_endpoint(value, use); };
}

bool is_replica_name(const std::string& value) {
  const auto is_printable = [](char c) { return c > ' ' && c < 0x7f; };
  return value.size() <= 128 && std::all_of(value.begin(), value.end(), is_printable);
}

std::span<const Setting<ControllerConfig>> controller_settings() {
  static const std::vector<Setting<ControllerConfig>> settings = make_controller_settings();
  return settings;
}

Result<ControllerConfig> read_controller_settings(const SettingFlags& flags,
                                                  const std::optional<std::string>& config_file) {
  return read_settings(controller_settings(), {config_file, ::getenv, flags});
}

void add_controller_option(CLI::App& command, SettingFlags& flags) {
  add_setting_options(command, client_settings(), flags);
}

Result<ControllerAddress> controller_of(const SettingFlags& flags) {
  ClientConfig config = KVFERRY_TRY(read_settings(client_settings(), {{}, ::getenv, flags}));
  return ControllerAddress{std::move(config.controller), KVFERRY_TRY(net::read_cluster_key(config.cluster_key_file))};
}

std::string state_folder(const ControllerConfig& config) {
  if (config.state == "none") return {};
  if (!config.state.empty()) return config.state;
  // The default folder's name contains the port. An ipc:// endpoint has no port, and a controller with port 0 gets any
  // free port at each start, so it would not find its former state.
  const std::optional<net::HostPort> bind = net::address_of_endpoint(config.bind);
  if (!bind || bind->port == 0) return {};
  const std::uint16_t port = bind->port;
  const char* state_home = std::getenv("XDG_STATE_HOME");
  const char* home = std::getenv("HOME");
  if (state_home != nullptr && *state_home == '/') return fmt::format("{}/kvferry/controller-{}", state_home, port);
  if (home != nullptr && *home != '\0') return fmt::format("{}/.local/state/kvferry/controller-{}", home, port);
  log().warn(
      "the controller keeps no state for a restart, because neither HOME nor XDG_STATE_HOME names a folder; set the "
      "setting state to a folder or to 'none'");
  return {};
}

Result<std::optional<controller::scale::ReplicaOptions>> replica_options(const ControllerConfig& config,
                                                                         const std::string& endpoint) {
  if (config.etcd.empty() && config.event_log.empty()) return std::optional<controller::scale::ReplicaOptions>{};
  controller::scale::ReplicaOptions options{.name = config.replica, .endpoint = config.advertise};
  if (!config.etcd.empty()) {
    Result<controller::scale::EtcdUrl> url = controller::scale::parse_etcd_url(config.etcd);
    if (!url) return std::move(url).error().with("etcd");
    options.etcd = std::move(*url);
  }
  if (!config.event_log.empty()) {
    Result<controller::scale::RedisUrl> url = controller::scale::parse_redis_url(config.event_log);
    if (!url) return std::move(url).error().with("event-log");
    options.event_log = std::move(*url);
  }
  if (options.endpoint.empty()) {
    for (const std::string_view anywhere : {"tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"}) {
      if (endpoint.starts_with(anywhere))
        return Error{
            ErrorCode::kInvalidArgument,
            fmt::format("the setting advertise is missing: other machines can't reach this replica at {}; allowed: "
                        "tcp://HOST:PORT as other machines reach it",
                        endpoint)};
    }
    options.endpoint = endpoint;
  }
  if (options.name.empty()) options.name = options.endpoint.substr(options.endpoint.find("://") + 3);
  options.run = static_cast<std::uint64_t>(wall_clock_ms());
  return std::optional(std::move(options));
}

}  // namespace kvferry::cli
