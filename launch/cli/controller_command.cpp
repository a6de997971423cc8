#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#include "controller/endpoint.h"
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
  Result<std::unique_ptr<controller::Server>> server = controller::Server::bind(options, clock);
  if (!server) return std::move(server).error();
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
  command->add_option("--config", *config_file, "YAML file of the keys bind, stream and state");
  return [flags, config_file] { return run(*flags, *config_file); };
}

}  // namespace kvferry::cli
