#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <memory>
#include <random>

#include "controller/endpoint.h"
#include "controller/scale/replica.h"
#include "controller/server.h"
#include "launch/cli/commands.h"
#include "launch/cli/settings.h"
#include "transport/base/log.h"

namespace kvferry::cli {
namespace {

bool is_replica_name(std::string_view value) {
  const auto is_printable = [](char c) { return c > ' ' && c < 0x7f; };
  return value.size() <= 128 && std::all_of(value.begin(), value.end(), is_printable);
}

const Setting kSettings[] = {
    {"bind", "tcp://127.0.0.1:14600", "tcp://HOST:PORT with a port of 0 to 65535 (0: any free one), or ipc://PATH",
     [](std::string_view value) {
       return static_cast<bool>(controller::check_endpoint(value, controller::EndpointUse::kBind));
     }},
    {"state", "none", "none", [](std::string_view value) { return value == "none"; }},
    // These two may hold passwords, so what is wrong with them is told by their own parsers, without the value.
    {"etcd", "", "http://HOST:PORT[,...][/PREFIX]", [](std::string_view) { return true; }},
    {"event-log", "", "redis://HOST[:PORT][/DB][?stream=NAME&bytes=N]", [](std::string_view) { return true; }},
    {"replica", "", "a name of up to 128 printable letters", is_replica_name},
    {"advertise", "", "tcp://HOST:PORT with a port of 1 to 65535, or ipc://PATH",
     [](std::string_view value) {
       return value.empty() || static_cast<bool>(controller::check_endpoint(value, controller::EndpointUse::kConnect));
     }},
};

/// What makes it one of several; nullopt: it is alone.
Result<std::optional<controller::scale::ReplicaOptions>> replica_options(const Values& values,
                                                                         const std::string& endpoint) {
  const std::string& etcd = values.at("etcd");
  const std::string& event_log = values.at("event-log");
  if (etcd.empty() && event_log.empty()) return std::optional<controller::scale::ReplicaOptions>{};
  controller::scale::ReplicaOptions options{.name = values.at("replica"), .endpoint = values.at("advertise")};
  if (!etcd.empty()) {
    Result<controller::scale::EtcdUrl> url = controller::scale::parse_etcd_url(etcd);
    if (!url) return std::move(url).error().with("etcd");
    options.etcd = std::move(*url);
  }
  if (!event_log.empty()) {
    Result<controller::scale::RedisUrl> url = controller::scale::parse_redis_url(event_log);
    if (!url) return std::move(url).error().with("event-log");
    options.event_log = std::move(*url);
  }
  if (options.endpoint.empty()) {
    for (const std::string_view anywhere : {"tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"}) {
      if (endpoint.starts_with(anywhere))
        return Error{ErrorCode::kInvalidArgument,
                     fmt::format("advertise is missing: nodes can't be told to reach this replica at {}; allowed: "
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

std::atomic<controller::Server*> g_server{nullptr};

extern "C" void stop_server(int) {
  if (controller::Server* server = g_server.load()) server->stop();
}

Result<void> run(const Values& flags, const std::optional<std::string>& config_file) {
  Result<Values> values = resolve(kSettings, flags, config_file);
  if (!values) return std::move(values).error();
  const SteadyClock clock;
  controller::ServerOptions options{.bind = values->at("bind"), .directory = {}};
  std::random_device random;  // nobody shall choose keys that all fall on one place of the table
  options.directory.index.seed = std::uint64_t{random()} << 32 | random();
  Result<std::unique_ptr<controller::Server>> server = controller::Server::bind(options, clock);
  if (!server) return std::move(server).error();
  Result<std::optional<controller::scale::ReplicaOptions>> replica = replica_options(*values, (*server)->endpoint());
  if (!replica) return std::move(replica).error();
  if (*replica) {
    auto front = controller::scale::make_replica(std::move(**replica), (*server)->sessions(), clock.now());
    if (Result<void> added = (*server)->add_front(std::move(front)); !added) return std::move(added).error();
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
  const auto add = [&](const std::string& key, const std::string& help) {
    command->add_option_function<std::string>(
        "--" + key, [flags, key](const std::string& value) { (*flags)[key] = value; }, help);
  };
  add("etcd",
      "Be one of several replicas that agree by etcd: http://HOST:PORT of each member, with commas between, then "
      "perhaps /PREFIX of all keys [/kvferry]");
  add("event-log",
      "Tell replicas that come late what nodes said before, by a stream of Redis or Valkey: "
      "redis://HOST[:PORT][/DB][?stream=NAME&bytes=N] [?stream=kvferry:events&bytes=268435456]");
  add("replica", "Name of this replica, which it keeps over restarts [HOST:PORT of --advertise]");
  add("advertise", "Where nodes reach this replica: tcp://HOST:PORT or ipc://PATH [where it listens]");
  command->add_option("--config", *config_file, "YAML file of the same keys, without --");
  return [flags, config_file] { return run(*flags, *config_file); };
}

}  // namespace kvferry::cli
