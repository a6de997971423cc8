#include "launch/cli/controller_settings.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>

#include "controller/api/endpoint.h"
#include "controller/http/http_listener.h"

namespace kvferry::cli {
namespace {

using controller::EndpointUse;

bool is_replica_name(std::string_view value) {
  const auto is_printable = [](char c) { return c > ' ' && c < 0x7f; };
  return value.size() <= 128 && std::all_of(value.begin(), value.end(), is_printable);
}

bool is_endpoint(std::string_view value, EndpointUse use) {
  return static_cast<bool>(controller::check_endpoint(value, use));
}

const std::string kStreamAllowed = fmt::format("none, {}", controller::allowed_endpoints(EndpointUse::kBindStream));

const ControllerSetting kSettings[] = {
    {{"bind", "tcp://127.0.0.1:14600", "tcp://HOST:PORT with a port of 0 to 65535 (0: any free one), or ipc://PATH",
      [](std::string_view value) { return is_endpoint(value, EndpointUse::kBind); }},
     "Where to listen: tcp://HOST:PORT (port 0: any free one), or ipc://PATH [tcp://127.0.0.1:14600]"},
    {{"stream", "none", kStreamAllowed,
      [](std::string_view value) { return value == "none" || is_endpoint(value, EndpointUse::kBindStream); }},
     fmt::format("Where to listen as well, for the shortest way: {} [none]", kStreamAllowed)},
    {{"http", "none", "none, or HOST:PORT with a port of 0 to 65535 (0: any free one)",
      [](std::string_view value) {
        return value == "none" || static_cast<bool>(controller::parse_http_address(std::string(value)));
      }},
     "Where to serve metrics, a status page and routers' queries: none, or HOST:PORT (port 0: any free one) [none]"},
    {{"state", "", "a folder, or none", [](std::string_view) { return true; }},
     "The folder that keeps what survives a restart, or 'none': then nodes publish again "
     "[${XDG_STATE_HOME:-~/.local/state}/kvferry/controller-PORT; none for port 0 and ipc]"},
    // These two may hold passwords, so what is wrong with them is told by their own parsers, without the value.
    {{"etcd", "", "http://HOST:PORT[,...][/PREFIX]", [](std::string_view) { return true; }},
     "Be one of several replicas that agree by etcd: http://HOST:PORT of each member, with commas between, then "
     "perhaps "
     "/PREFIX of all keys [/kvferry]"},
    {{"event-log", "", "redis://HOST[:PORT][/DB][?stream=NAME&bytes=N]", [](std::string_view) { return true; }},
     "Tell replicas that come late what nodes said before, by a stream of Redis or Valkey: "
     "redis://HOST[:PORT][/DB][?stream=NAME&bytes=N] [?stream=kvferry:events&bytes=268435456]"},
    {{"replica", "", "a name of up to 128 printable letters", is_replica_name},
     "Name of this replica, which it keeps over restarts [HOST:PORT of --advertise]"},
    {{"advertise", "", "tcp://HOST:PORT with a port of 1 to 65535, or ipc://PATH",
      [](std::string_view value) { return value.empty() || is_endpoint(value, EndpointUse::kConnect); }},
     "Where nodes reach this replica: tcp://HOST:PORT or ipc://PATH [where it listens]"},
};

}  // namespace

std::span<const ControllerSetting> controller_settings() { return kSettings; }

std::string state_folder(const Values& values) {
  const std::string& state = values.at("state");
  if (state == "none") return {};
  if (!state.empty()) return state;
  // On a port of its own a controller finds its state again; on any free one it would not.
  const std::string& bind = values.at("bind");
  const std::string port = bind.substr(bind.rfind(':') + 1);
  if (!bind.starts_with("tcp://") || port.find_first_not_of('0') == std::string::npos) return {};
  const char* state_home = std::getenv("XDG_STATE_HOME");
  const char* home = std::getenv("HOME");
  if (state_home != nullptr && *state_home == '/') return fmt::format("{}/kvferry/controller-{}", state_home, port);
  if (home != nullptr && *home != '\0') return fmt::format("{}/.local/state/kvferry/controller-{}", home, port);
  return {};
}

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

}  // namespace kvferry::cli
