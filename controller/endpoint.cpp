#include "controller/endpoint.h"

#include <algorithm>
#include <charconv>

namespace kvferry::controller {
namespace {

constexpr std::size_t kIpcPathBytesMax = 107;  // sockaddr_un, less its final zero

bool is_tcp(std::string_view address, int port_min) {
  const std::size_t colon = address.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return false;
  const std::string_view host = address.substr(0, colon);
  const std::string_view port = address.substr(colon + 1);
  const bool bracketed = host.front() == '[' && host.back() == ']' && host.size() > 2;
  const auto bad = [&](char c) { return c <= ' ' || c == '/' || c == ';' || c == 0x7f || (c == ':' && !bracketed); };
  if (std::any_of(host.begin(), host.end(), bad)) return false;
  int number = 0;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
  return error == std::errc{} && end == port.data() + port.size() && number >= port_min && number <= 65'535;
}

}  // namespace

Result<void> check_endpoint(std::string_view endpoint, EndpointUse use) {
  constexpr std::string_view kTcp = "tcp://";
  constexpr std::string_view kIpc = "ipc://";
  const int port_min = use == EndpointUse::kBind ? 0 : 1;
  if (endpoint.starts_with(kTcp) && is_tcp(endpoint.substr(kTcp.size()), port_min)) return {};
  if (endpoint.starts_with(kIpc) && endpoint.size() > kIpc.size() && endpoint.size() - kIpc.size() <= kIpcPathBytesMax)
    return {};
  return Error{
      ErrorCode::kInvalidArgument,
      fmt::format("'{}' is not an endpoint; allowed: tcp://HOST:PORT with a port of {} to 65535, or ipc://PATH "
                  "with a path of at most {} bytes",
                  endpoint, port_min, kIpcPathBytesMax)};
}

}  // namespace kvferry::controller
