#include "controller/api/endpoint.h"

#include <algorithm>
#include <optional>

#include "transport/base/net/tcp_socket.h"

namespace kvferry::controller {
namespace {

// sizeof(sockaddr_un::sun_path) without the final zero. The texts of allowed_endpoints() contain this number.
constexpr std::size_t kPathBytesMax = 107;
constexpr std::string_view kTcp = "tcp://";
constexpr std::string_view kIpc = "ipc://";
constexpr std::string_view kUnix = "unix://";
constexpr std::string_view kStream = "stream://";

bool is_host_and_port(std::string_view text, int port_min) {
  const Result<net::HostPort> address = net::parse_host_port(text);
  return address && address->port >= port_min;
}

bool is_path(std::string_view path) { return !path.empty() && path.size() <= kPathBytesMax; }

bool is_absolute_path(std::string_view path) {
  return is_path(path) && path.front() == '/' && path.back() != '/' && path.find('\0') == std::string_view::npos;
}

}  // namespace

std::string_view allowed_endpoints(EndpointUse use) {
  switch (use) {
    case EndpointUse::kBind:
      return "tcp://HOST:PORT with a port of 0 to 65535 (0: any free port), or ipc://PATH with a path of at most 107 "
             "bytes";
    case EndpointUse::kBindStream:
      return "unix:///ABSOLUTE/PATH with a path of at most 107 bytes, or stream://HOST:PORT with a port of 0 to 65535 "
             "(0: any free port)";
    case EndpointUse::kConnect:
      break;
  }
  return "tcp://HOST:PORT or stream://HOST:PORT with a port of 1 to 65535, ipc://PATH or unix:///ABSOLUTE/PATH with a "
         "path of at most 107 bytes";
}

Result<void> check_endpoint(std::string_view endpoint, EndpointUse use) {
  const int port_min = use == EndpointUse::kConnect ? 1 : 0;
  const auto after = [&](std::string_view scheme) { return endpoint.substr(scheme.size()); };
  if (use != EndpointUse::kBindStream) {
    if (endpoint.starts_with(kTcp) && is_host_and_port(after(kTcp), port_min)) return {};
    if (endpoint.starts_with(kIpc) && is_path(after(kIpc))) return {};
  }
  if (use != EndpointUse::kBind) {
    if (endpoint.starts_with(kStream) && is_host_and_port(after(kStream), port_min)) return {};
    if (endpoint.starts_with(kUnix) && is_absolute_path(after(kUnix))) return {};
  }
  return Error{ErrorCode::kInvalidArgument,
               fmt::format("'{}' can't be used as an endpoint here; allowed: {}", endpoint, allowed_endpoints(use))};
}

Result<void> check_for_cluster_key(std::string_view endpoint) {
  if (!endpoint.starts_with(kStream)) return {};
  return Error{
      ErrorCode::kInvalidArgument,
      fmt::format("'{}' is neither encrypted nor authenticated; allowed with a cluster key: tcp://, ipc:// and "
                  "unix://",
                  endpoint)};
}

bool is_beyond_loopback(std::string_view endpoint) {
  const std::optional<net::HostPort> address = net::address_of_endpoint(endpoint);
  return address && address->host != "localhost" && !net::is_loopback(address->host);
}

Result<void> check_without_key(std::string_view endpoint) {
  if (!is_beyond_loopback(endpoint)) return {};
  return Error{ErrorCode::kInvalidArgument,
               fmt::format("there is no cluster key, and other hosts could reach this process at {}; make a key with "
                           "'kvferry keygen FILE' and name it in KVFERRY_CLUSTER_KEY_FILE, or set 'insecure' on a "
                           "network where every host is trusted",
                           endpoint)};
}

Result<std::vector<std::string>> split_endpoints(std::string_view list) {
  std::vector<std::string> endpoints;
  for (std::size_t begin = 0; begin <= list.size();) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    const std::string_view endpoint = list.substr(begin, end - begin);
    KVFERRY_TRY(check_endpoint(endpoint, EndpointUse::kConnect));
    if (std::find(endpoints.begin(), endpoints.end(), endpoint) != endpoints.end()) {
      return Error{
          ErrorCode::kInvalidArgument,
          fmt::format("'{}' names {} twice; allowed: each controller once, separated by commas", list, endpoint)};
    }
    endpoints.emplace_back(endpoint);
    begin = end + 1;
  }
  return endpoints;
}

bool is_stream(std::string_view endpoint) { return endpoint.starts_with(kUnix) || endpoint.starts_with(kStream); }

StreamAddress stream_address(std::string_view endpoint) {
  StreamAddress address;
  if (endpoint.starts_with(kUnix)) {
    address.path = endpoint.substr(kUnix.size());
    return address;
  }
  address.tcp = net::parse_host_port(endpoint.substr(kStream.size())).value();
  return address;
}

}  // namespace kvferry::controller
