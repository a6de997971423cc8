#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <memory>
#include <random>

#include "controller/api/endpoint.h"
#include "controller/engines/engine_events_listener.h"
#include "controller/http/http_listener.h"
#include "controller/server/server.h"
#include "launch/cli/commands.h"
#include "launch/cli/controller_settings.h"
#include "transport/base/log.h"
#include "transport/base/wall_clock.h"

namespace kvferry::cli {
namespace {

std::atomic<controller::Server*> g_server{nullptr};

/// Returns the newest incarnation that the controller accepts. An incarnation is the time at which a node started, in
/// nanoseconds; it may be up to an hour ahead of this host's clock, since the clocks of a cluster differ by less.
std::uint64_t newest_incarnation() {
  return static_cast<std::uint64_t>((std::chrono::system_clock::now() + std::chrono::hours(1)).time_since_epoch() /
                                    std::chrono::nanoseconds(1));
}

extern "C" void stop_server(int) {
  if (controller::Server* server = g_server.load()) server->stop();
}

/// Raises the limit on open files to the hard limit: shells often set 1024, but the controller needs one file
/// descriptor for the connection of each node, and several for each engine that is registered over HTTP.
void raise_file_limit() {
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur >= files.rlim_max) return;
  files.rlim_cur = files.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &files);
}

/// Returns the certificate of the HTTP listener, nullopt if the settings name neither a certificate nor its key.
/// Errors: kInvalidArgument if they name only one of the two, or if `http` is none; those of HttpCertificate::read().
Result<std::optional<controller::HttpCertificate>> http_certificate(const ControllerConfig& config) {
  if (config.http_cert_file.empty() && config.http_key_file.empty())
    return std::optional<controller::HttpCertificate>();
  for (const auto& [name, is_set] :
       {std::pair("http", config.http != "none"), std::pair("http-cert-file", !config.http_cert_file.empty()),
        std::pair("http-key-file", !config.http_key_file.empty())})
    if (!is_set)
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("HTTPS needs the settings 'http', 'http-cert-file' and 'http-key-file', but '{}' is not "
                               "set",
                               name)};
  return std::optional(KVFERRY_TRY(controller::HttpCertificate::read(config.http_cert_file, config.http_key_file)));
}

/// Adds the HTTP listener, and the listener for events of engines that are registered over HTTP. Returns the HTTP
/// listener's actual address.
Result<std::string> add_http(controller::Server& server, controller::EngineDirectory& engines,
                             const std::string& address, const std::optional<net::ClusterKey>& key,
                             std::optional<controller::HttpCertificate> certificate) {
  const net::HostPort host_port = KVFERRY_TRY(net::parse_host_port(address));
  std::unique_ptr<controller::EngineEventsListener> events = controller::EngineEventsListener::make(engines);
  const controller::HttpBackend backend{server.sessions(), engines, *events, server.endpoint()};
  KVFERRY_TRY(server.add_listener(std::move(events)));
  return server.add_bound(controller::listen_http(host_port, backend, key, std::move(certificate)));
}

Result<void> add_replica(controller::Server& server, const ControllerConfig& config, const Clock& clock) {
  std::optional<controller::scale::ReplicaOptions> options = KVFERRY_TRY(replica_options(config, server.endpoint()));
  if (!options) return {};
  return server.add_listener(controller::scale::make_replica(std::move(*options), server.sessions(), clock.now()));
}

Result<void> run(const SettingFlags& flags, const std::optional<std::string>& config_file) {
  const ControllerConfig config = KVFERRY_TRY(read_controller_settings(flags, config_file));
  raise_file_limit();
  const SteadyClock clock;
  controller::ServerOptions options{.bind = config.bind, .state = state_folder(config), .directory = {}};
  options.cluster_key = KVFERRY_TRY(net::read_cluster_key(config.cluster_key_file));
  std::optional<controller::HttpCertificate> certificate = KVFERRY_TRY(http_certificate(config));
  if (config.stream != "none") options.stream = config.stream;
  bool is_open = false;
  for (const std::string& endpoint : {options.bind, options.stream, "http://" + config.http}) {
    if (options.cluster_key || !controller::is_beyond_loopback(endpoint)) continue;
    if (!config.insecure) KVFERRY_TRY(controller::check_without_key(endpoint));
    is_open = true;
  }
  options.directory.lease_ms = config.lease_ms;
  options.directory.newest_incarnation = newest_incarnation;
  options.directory.wall_ms = wall_clock_ms;
  std::random_device random;  // a random seed, so that clients can't choose keys that collide
  options.directory.index.seed = std::uint64_t{random()} << 32 | random();
  // `engines` is declared before `server`, because the server's listeners refer to it.
  controller::EngineDirectory engines({.index = options.directory.index});
  std::unique_ptr<controller::Server> server = KVFERRY_TRY(controller::Server::bind(options, clock));
  server->sessions().set_insecure(is_open);
  if (config.http != "none") {
    const bool is_encrypted = certificate.has_value();
    const std::string listening =
        KVFERRY_TRY(add_http(*server, engines, config.http, options.cluster_key, std::move(certificate)));
    log().info("HTTP on {}{}", listening, is_encrypted ? " (HTTPS)" : "");
  }
  KVFERRY_TRY(add_replica(*server, config, clock));
  if (is_open)
    log().warn(
        "insecure: every host that reaches this controller can register nodes and clear the index; set "
        "cluster-key-file to prevent this");
  g_server = server.get();
  struct sigaction action {};
  action.sa_handler = stop_server;
  for (const int signal : {SIGINT, SIGTERM}) ::sigaction(signal, &action, nullptr);
  fmt::print("kvferry controller listening on {}\n", server->endpoint());
  if (!options.stream.empty()) fmt::print("kvferry controller listening on {}\n", server->stream_endpoint());
  std::fflush(stdout);
  server->run();
  g_server = nullptr;
  log().info("controller stopped");
  return {};
}

}  // namespace

Run add_controller_command(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("controller",
                         "Run the controller, which records which node holds which chunk, until SIGINT or SIGTERM. "
                         "Each option but --config can also be "
                         "a key of the config file, or KVFERRY_<KEY> in the environment.");
  auto flags = std::make_shared<SettingFlags>();
  auto config_file = std::make_shared<std::optional<std::string>>();
  add_setting_options(*command, controller_settings(), *flags);
  command->add_option("--config", *config_file, "YAML file with these options as keys, without --");
  return [flags, config_file] { return run(*flags, *config_file); };
}

}  // namespace kvferry::cli
