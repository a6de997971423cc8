#include "launch/cli/controller_settings.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>

#include "controller/api/endpoint.h"
#include "transport/base/log.h"
#include "transport/base/net/host_port.h"

namespace kvferry::cli {
namespace {

using controller::EndpointUse;

struct ClientConfig {
  std::string controller = "tcp://127.0.0.1:14600";
  std::string cluster_key_file;
};

const std::string kKeyFileAllowed = "the path of a file of 32 to 65536 bytes with mode 0600 or 0400";

std::function<bool(const std::string&)> is_endpoint(EndpointUse use, std::optional<std::string_view> or_word = {}) {
  return [=](const std::string& value) { return value == or_word || controller::check_endpoint(value, use); };
}

bool is_replica_name(const std::string& value) {
  const auto is_printable = [](char c) { return c > ' ' && c < 0x7f; };
  return value.size() <= 128 && std::all_of(value.begin(), value.end(), is_printable);
}

std::vector<Setting<ControllerConfig>> make_controller_settings() {
  using C = ControllerConfig;
  return {
      setting<C, std::string>("bind", &C::bind,
                              "tcp://HOST:PORT with a port of 0 to 65535 (0: any free one), or ipc://PATH",
                              "Where to listen", is_endpoint(EndpointUse::kBind)),
      setting<C, std::string>(
          "stream", &C::stream, fmt::format("none, {}", controller::allowed_endpoints(EndpointUse::kBindStream)),
          "Second endpoint to listen at, with less latency than ZeroMQ", is_endpoint(EndpointUse::kBindStream, "none")),
      setting<C, std::string>("http", &C::http, "none, or HOST:PORT with a port of 0 to 65535 (0: any free one)",
                              "Where to serve metrics, a status page and routers' queries",
                              [](const std::string& value) { return value == "none" || net::parse_host_port(value); }),
      setting("state", &C::state, "a folder, or 'none'",
              "Folder of the state that survives a restart; with 'none' nodes publish their chunks again")
          .with_shown_default("${XDG_STATE_HOME:-~/.local/state}/kvferry/controller-PORT; none for port 0 and ipc"),
      // etcd and event-log may hold passwords: their own parsers check them, with messages that leave the value out.
      setting("etcd", &C::etcd, "http://HOST:PORT[,...][/PREFIX]",
              "The etcd through which several replicas agree: all of its members with commas between, then "
              "optionally a prefix of all keys")
          .with_shown_default("none; the prefix is /kvferry"),
      setting("event-log", &C::event_log, "redis://HOST[:PORT][/DB][?stream=NAME&bytes=N]",
              "Stream of Redis or Valkey from which later replicas read what nodes published before")
          .with_shown_default("none; without ?stream and bytes: stream kvferry:events of 268435456 bytes"),
      setting<C, std::string>("replica", &C::replica, "a name of up to 128 printable letters",
                              "Name of this replica, which must stay the same over restarts", is_replica_name)
          .with_shown_default("HOST:PORT of --advertise"),
      setting<C, std::string>("advertise", &C::advertise, "tcp://HOST:PORT with a port of 1 to 65535, or ipc://PATH",
                              "Where nodes reach this replica", is_endpoint(EndpointUse::kConnect, ""))
          .with_shown_default("the endpoint of --bind"),
      setting("cluster-key-file", &C::cluster_key_file, kKeyFileAllowed,
              "Key of the deployment (kvferry keygen): only those who have it can use --bind if that is tcp://, over "
              "encrypted connections")
          .with_shown_default("none"),
      setting("insecure", &C::insecure, "true or false; as a flag without a value",
              "Whether the controller starts without a cluster key although other hosts can reach it: each of them can "
              "then register nodes and clear what others hold"),
  };
}

std::span<const Setting<ClientConfig>> client_settings() {
  using C = ClientConfig;
  static const Setting<C> settings[] = {
      setting<C, std::string>("controller", &C::controller,
                              std::string(controller::allowed_endpoints(EndpointUse::kConnect)),
                              "The controller; also KVFERRY_CONTROLLER", is_endpoint(EndpointUse::kConnect)),
      setting("cluster-key-file", &C::cluster_key_file, kKeyFileAllowed,
              "Key of the controller's deployment; also KVFERRY_CLUSTER_KEY_FILE")
          .with_shown_default("none")};
  return settings;
}

}  // namespace

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
  // The state belongs to a port: a controller on any free port would not find it again.
  const std::optional<net::HostPort> bind = net::address_of_endpoint(config.bind);
  if (!bind || bind->port == 0) return {};
  const std::uint16_t port = bind->port;
  const char* state_home = std::getenv("XDG_STATE_HOME");
  const char* home = std::getenv("HOME");
  if (state_home != nullptr && *state_home == '/') return fmt::format("{}/kvferry/controller-{}", state_home, port);
  if (home != nullptr && *home != '\0') return fmt::format("{}/.local/state/kvferry/controller-{}", home, port);
  log().warn(
      "nothing is kept for a restart: neither HOME nor XDG_STATE_HOME names a folder for the state; set state to "
      "a folder or to 'none'");
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
        return Error{ErrorCode::kInvalidArgument,
                     fmt::format("advertise is missing: other machines can't reach this replica at {}; allowed: "
                                 "tcp://HOST:PORT as other machines reach it",
                                 endpoint)};
    }
    options.endpoint = endpoint;
  }
  if (options.name.empty()) options.name = options.endpoint.substr(options.endpoint.find("://") + 3);
  const auto since_epoch = std::chrono::system_clock::now().time_since_epoch();
  options.run = static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(since_epoch).count());
  return std::optional(std::move(options));
}

}  // namespace kvferry::cli
