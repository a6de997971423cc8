#include <sys/resource.h>

#include <csignal>
#include <cstdio>
#include <memory>
#include <random>

#include "controller/endpoint.h"
#include "controller/engine_events_front.h"
#include "controller/http_front.h"
#include "controller/server.h"
#include "launch/cli/commands.h"
#include "launch/cli/settings.h"
#include "transport/base/log.h"

namespace kvferry::cli {
namespace {

const Setting kSettings[] = {
    {"bind", "tcp://127.0.0.1:14600", "tcp://HOST:PORT with a port of 0 to 65535 (0: any free one), or ipc://PATH",
     [](std::string_view value) {
       return static_cast<bool>(controller::check_endpoint(value, controller::EndpointUse::kBind));
     }},
    {"state", "none", "none", [](std::string_view value) { return value == "none"; }},
    {"http", "none", "none, or HOST:PORT with a port of 0 to 65535 (0: any free one)",
     [](std::string_view value) {
       return value == "none" || static_cast<bool>(controller::parse_http_address(std::string(value)));
     }},
};

std::atomic<controller::Server*> g_server{nullptr};

extern "C" void stop_server(int) {
  if (controller::Server* server = g_server.load()) server->stop();
}

/// HTTP, and the engines that are registered over it. The address that it listens on.
Result<std::string> add_http(controller::Server& server, controller::EngineDirectory& engines,
                             const std::string& address) {
  rlimit files{};  // each engine takes a handful of descriptors
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
    files.rlim_cur = files.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &files);
  }
  Result<controller::HttpOptions> options = controller::parse_http_address(address);
  if (!options) return std::move(options).error();
  std::unique_ptr<controller::EngineEventsFront> events = controller::EngineEventsFront::make(engines);
  controller::HttpBackend backend{.status = [&server](TimeNs now) { return server.sessions().status(now); },
                                  .endpoint = server.endpoint(),
                                  .engines = &engines,
                                  .events = events.get()};
  if (Result<void> added = server.add_front(std::move(events)); !added) return std::move(added).error();
  Result<std::unique_ptr<controller::HttpFront>> http = controller::HttpFront::bind(*options, std::move(backend));
  if (!http) return std::move(http).error();
  std::string listening = (*http)->address();
  if (Result<void> added = server.add_front(*std::move(http)); !added) return std::move(added).error();
  return listening;
}

Result<void> run(const Values& flags, const std::optional<std::string>& config_file) {
  Result<Values> values = resolve(kSettings, flags, config_file);
  if (!values) return std::move(values).error();
  const SteadyClock clock;
  controller::ServerOptions options{.bind = values->at("bind"), .directory = {}};
  std::random_device random;  // nobody shall choose keys that all fall on one place of the table
  options.directory.index.seed = std::uint64_t{random()} << 32 | random();
  controller::EngineDirectoryOptions engine_options;
  engine_options.index.index = options.directory.index;
  controller::EngineDirectory engines(engine_options);  // outlives the server, whose fronts refer to it
  Result<std::unique_ptr<controller::Server>> server = controller::Server::bind(options, clock);
  if (!server) return std::move(server).error();
  const std::string& http = values->at("http");
  if (http != "none") {
    const Result<std::string> listening = add_http(**server, engines, http);
    if (!listening) return listening.error();
    log().info("HTTP on {}", *listening);
  }
  g_server = server->get();
  struct sigaction action {};
  action.sa_handler = stop_server;
  for (const int signal : {SIGINT, SIGTERM}) ::sigaction(signal, &action, nullptr);
  fmt::print("kvferry controller listening on {}\n", (*server)->endpoint());
  std::fflush(stdout);
  (*server)->run();
  g_server = nullptr;
  log().info("controller ends");
  return {};
}

}  // namespace

Run add_controller_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "controller",
      "Tell nodes which node holds which chunk; runs until SIGINT or SIGTERM. Each option but --config "
      "can also be a key of the config file, or KVFERRY_<KEY> in the environment.");
  auto flags = std::make_shared<Values>();
  auto config_file = std::make_shared<std::optional<std::string>>();
  command->add_option_function<std::string>(
      "--bind", [flags](const std::string& value) { (*flags)["bind"] = value; },
      fmt::format("Where to listen: {} [{}]", kSettings[0].allowed, kSettings[0].fallback));
  command->add_option_function<std::string>(
      "--state", [flags](const std::string& value) { (*flags)["state"] = value; },
      "What survives a restart; only 'none' exists: nodes publish again [none]");
  command->add_option_function<std::string>(
      "--http", [flags](const std::string& value) { (*flags)["http"] = value; },
      "Where to serve metrics, a status page and routers' queries: none, or HOST:PORT (port 0: any free one) [none]");
  command->add_option("--config", *config_file, "YAML file of the keys bind, state and http");
  return [flags, config_file] { return run(*flags, *config_file); };
}

}  // namespace kvferry::cli
