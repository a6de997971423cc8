#include <sys/resource.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
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

const std::string kStreamAllowed =
    fmt::format("none, {}", controller::allowed_endpoints(controller::EndpointUse::kBindStream));

const Setting kSettings[] = {
    {"bind", "tcp://127.0.0.1:14600", controller::allowed_endpoints(controller::EndpointUse::kBind),
     [](std::string_view value) {
       return static_cast<bool>(controller::check_endpoint(value, controller::EndpointUse::kBind));
     }},
    {"stream", "none", kStreamAllowed,
     [](std::string_view value) {
       return value == "none" ||
              static_cast<bool>(controller::check_endpoint(value, controller::EndpointUse::kBindStream));
     }},
    {"state", "", "a folder, or none", [](std::string_view) { return true; }},
    {"http", "none", "none, or HOST:PORT with a port of 0 to 65535 (0: any free one)",
     [](std::string_view value) {
       return value == "none" || static_cast<bool>(controller::parse_http_address(std::string(value)));
     }},
};

/// Where a controller on a port of its own keeps its state unless it is told otherwise. Empty: nowhere, because it
/// would not find it again.
std::string default_state(std::string_view bind) {
  const std::string_view port = bind.substr(bind.rfind(':') + 1);
  if (!bind.starts_with("tcp://") || port.find_first_not_of('0') == std::string_view::npos) return {};
  const char* state_home = std::getenv("XDG_STATE_HOME");
  const char* home = std::getenv("HOME");
  std::string folder;
  if (state_home != nullptr && *state_home == '/')
    folder = state_home;
  else if (home != nullptr && *home != '\0')
    folder = fmt::format("{}/.local/state", home);
  else
    return {};
  return fmt::format("{}/kvferry/controller-{}", folder, port);
}

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
  options.state = values->at("state");
  if (options.state.empty()) options.state = default_state(options.bind);
  if (options.state == "none") options.state.clear();
  if (values->at("stream") != "none") options.stream = values->at("stream");
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
  if (!options.stream.empty()) fmt::print("kvferry controller listening on {}\n", (*server)->stream_endpoint());
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
      "--stream", [flags](const std::string& value) { (*flags)["stream"] = value; },
      fmt::format("Where to listen as well, for the shortest way: {} [{}]", kStreamAllowed, kSettings[1].fallback));
  command->add_option_function<std::string>(
      "--state", [flags](const std::string& value) { (*flags)["state"] = value; },
      "The folder that keeps what survives a restart, or 'none': then nodes publish again "
      "[${XDG_STATE_HOME:-~/.local/state}/kvferry/controller-PORT; none for port 0 and ipc]");
  command->add_option_function<std::string>(
      "--http", [flags](const std::string& value) { (*flags)["http"] = value; },
      "Where to serve metrics, a status page and routers' queries: none, or HOST:PORT (port 0: any free one) [none]");
  command->add_option("--config", *config_file, "YAML file of the keys bind, stream, state and http");
  return [flags, config_file] { return run(*flags, *config_file); };
}

}  // namespace kvferry::cli
