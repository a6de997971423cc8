#include "connector/runtime/net_address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <charconv>

namespace kvferry {

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
    char text[INET_ADDRSTRLEN];
    if (::connect(fd, found->ai_addr, found->ai_addrlen) == 0 &&
        ::getsockname(fd, reinterpret_cast<sockaddr*>(&local), &size) == 0 &&
        ::inet_ntop(AF_INET, &local.sin_addr, text, sizeof text) != nullptr)
      address = text;
    ::close(fd);
  }
  ::freeaddrinfo(found);
  return address;
}

}  // namespace kvferry
