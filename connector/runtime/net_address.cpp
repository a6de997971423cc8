#include "connector/runtime/net_address.h"

#include <algorithm>
#include <string_view>
#include <thread>

#include "transport/base/net/host_port.h"
#include "transport/base/net/tcp_socket.h"

namespace kvferry {
namespace {

constexpr std::chrono::milliseconds kRetryPause{250};
constexpr const char* kLoopback = "127.0.0.1";
constexpr std::string_view kSetHost = "set advertise_host to an address of this host that the other nodes can reach";

/// What one search for routes to the controllers has found.
struct Route {
  std::string source;    // the local address towards a controller that is not on loopback
  std::string loopback;  // the local address towards a controller on loopback
  std::string failure;   // why one of the controllers that were tried has no route; empty: all of them have one
};

Route find_route(std::string_view controllers) {
  Route route;
  while (!controllers.empty() && route.source.empty()) {
    const std::string_view endpoint = controllers.substr(0, controllers.find(','));
    controllers.remove_prefix(std::min(endpoint.size() + 1, controllers.size()));
    const std::optional<net::HostPort> controller = net::address_of_endpoint(endpoint);
    if (!controller) continue;
    Result<std::string> source = net::source_address_towards(controller->host);
    if (!source)
      route.failure = std::move(source).error().what;
    else
      (net::is_loopback(*source) ? route.loopback : route.source) = std::move(*source);
  }
  return route;
}

/// Returns the source address of packets to other networks. If there is none, returns any address that is not loopback,
/// or an empty text if this host has only loopback.
std::string primary_address() {
  for (const char* documentation_address : {"192.0.2.1", "2001:db8::1"}) {
    const Result<std::string> source = net::source_address_towards(documentation_address);
    if (source && !net::is_loopback(*source)) return *source;
  }
  const std::vector<std::string> addresses = net::interface_addresses();
  return addresses.empty() ? "" : addresses.front();
}

}  // namespace

AdvertisedHost select_advertised_host(const std::string& controllers, std::chrono::milliseconds resolve_for) {
  const auto give_up_at = std::chrono::steady_clock::now() + resolve_for;
  Route route = find_route(controllers);
  while (route.source.empty() && !route.failure.empty() && std::chrono::steady_clock::now() < give_up_at) {
    std::this_thread::sleep_for(kRetryPause);
    route = find_route(controllers);
  }
  if (!route.source.empty()) return {route.source, ""};
  if (route.failure.empty() && !route.loopback.empty()) return {route.loopback, ""};
  const std::string primary = primary_address();
  if (primary.empty()) {
    return {kLoopback,
            fmt::format("this host has no address but loopback; therefore nodes on other hosts cannot pull from "
                        "this node; {}",
                        kSetHost)};
  }
  if (route.failure.empty()) return {primary, ""};
  return {primary, fmt::format("no route to the controllers '{}' is known ({}), so this node advertises {}; if "
                               "nodes on other hosts cannot reach it, {}",
                               controllers, route.failure, primary, kSetHost)};
}

Result<std::string> address_of_this_host(std::string name, const std::string& controllers) {
  if (name.starts_with('[') && name.ends_with(']')) name = name.substr(1, name.size() - 2);
  const Result<std::vector<std::string>> resolved = net::resolve(name);
  if (!resolved) {
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("{}; allowed: a name or an address of this host that the other nodes can reach",
                             resolved.error().what)};
  }
  const auto ipv4 = std::ranges::find_if(*resolved, [](const auto& one) { return one.find(':') == std::string::npos; });
  const std::string& address = ipv4 == resolved->end() ? resolved->front() : *ipv4;
  const bool is_misleading = net::is_loopback(address) && !net::is_numeric(name) && name != "localhost";
  return is_misleading ? select_advertised_host(controllers).host : address;
}

}  // namespace kvferry
