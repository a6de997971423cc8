#include "connector/runtime/net_address.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <charconv>

namespace kvferry {
namespace {

std::string to_text(const in_addr& address) {
  char text[INET_ADDRSTRLEN] = "";
  ::inet_ntop(AF_INET, &address, text, sizeof text);
  return text;
}

bool is_address(const std::string& name) {
  in_addr v4{};
  in6_addr v6{};
  return ::inet_pton(AF_INET, name.c_str(), &v4) == 1 || ::inet_pton(AF_INET6, name.c_str(), &v6) == 1;
}

}  // namespace

std::uint16_t port_of(const std::string& endpoint) {
  const std::size_t colon = endpoint.rfind(':');
  if (colon == std::string::npos) return 0;
  std::uint16_t port = 0;
  std::from_chars(endpoint.data() + colon + 1, endpoint.data() + endpoint.size(), port);
  return port;
}

std::string local_address_towards(const std::string& endpoints) {
  const std::string endpoint = endpoints.substr(0, endpoints.find(','));
  constexpr const char* kLoopback = "127.0.0.1";
  const std::size_t scheme = endpoint.find("://"), colon = endpoint.rfind(':');
  if (scheme == std::string::npos || colon <= scheme + 3) return kLoopback;
  const std::string host = endpoint.substr(scheme + 3, colon - scheme - 3);
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return kLoopback;
  std::string address = kLoopback;
  if (const int fd = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0); fd >= 0) {
    sockaddr_in local{};
    socklen_t size = sizeof local;
    if (::connect(fd, found->ai_addr, found->ai_addrlen) == 0 &&
        ::getsockname(fd, reinterpret_cast<sockaddr*>(&local), &size) == 0)
      address = to_text(local.sin_addr);
    ::close(fd);
  }
  ::freeaddrinfo(found);
  return address;
}

Result<std::string> address_of_this_host(const std::string& name, const std::string& endpoints) {
  if (is_address(name)) return name;
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int code = ::getaddrinfo(name.c_str(), nullptr, &hints, &found); code != 0) {
    return Error{ErrorCode::kInvalidArgument, fmt::format("'{}' is no host that is known here ({}); allowed: a name or "
                                                          "an address of this host, that the other nodes reach",
                                                          name, ::gai_strerror(code))};
  }
  const std::string address = to_text(reinterpret_cast<const sockaddr_in*>(found->ai_addr)->sin_addr);
  ::freeaddrinfo(found);
  const bool is_inward = address.starts_with("127.") && name != "localhost";
  return is_inward ? local_address_towards(endpoints) : address;
}

}  // namespace kvferry
