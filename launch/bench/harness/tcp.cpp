#include "launch/bench/harness/tcp.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>

namespace kvferry::bench {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

Result<Addresses> resolve(const std::string& host, std::uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (code != 0)
    return Error{ErrorCode::kUnavailable, fmt::format("host '{}' is not known: {}", host, ::gai_strerror(code))};
  return Addresses(found, &::freeaddrinfo);
}

}  // namespace

Result<HostPort> parse_host_port(std::string_view text) {
  const Error bad{ErrorCode::kInvalidArgument,
                  fmt::format("'{}' is not an address; allowed: HOST:PORT with a port of 0 to 65535", text)};
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return bad;
  std::string_view host = text.substr(0, colon);
  if (host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  const std::string_view digits = text.substr(colon + 1);
  std::uint16_t port = 0;
  const auto [end, failure] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (failure != std::errc() || end != digits.data() + digits.size() || host.empty()) return bad;
  return HostPort{std::string(host), port};
}

Result<int> tcp_listen(const std::string& host, std::uint16_t port) {
  Result<Addresses> addresses = resolve(host, port, AI_PASSIVE);
  if (!addresses) return std::move(addresses).error();
  const addrinfo& address = **addresses;
  const int fd = ::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  if (fd >= 0) ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (fd >= 0 && ::bind(fd, address.ai_addr, address.ai_addrlen) == 0 && ::listen(fd, 16) == 0) return fd;
  const std::string why = std::strerror(errno);
  if (fd >= 0) ::close(fd);
  return Error{ErrorCode::kUnavailable, fmt::format("can't listen on {}:{}: {}", host, port, why)};
}

Result<int> tcp_connect(const std::string& host, std::uint16_t port) {
  Result<Addresses> addresses = resolve(host, port, 0);
  if (!addresses) return std::move(addresses).error();
  std::string why;
  for (const addrinfo* address = addresses->get(); address != nullptr; address = address->ai_next) {
    const int fd = ::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && ::connect(fd, address->ai_addr, address->ai_addrlen) == 0) return fd;
    why = std::strerror(errno);
    if (fd >= 0) ::close(fd);
  }
  return Error{ErrorCode::kUnavailable, fmt::format("can't connect to {}:{}: {}", host, port, why)};
}

Result<int> tcp_accept(int listening, const Deadline& deadline) {
  while (true) {
    if (Result<void> ok = deadline.check("a connection"); !ok) return std::move(ok).error();
    pollfd waiting{listening, POLLIN, 0};
    if (::poll(&waiting, 1, 100) != 1) continue;
    const int fd = ::accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd >= 0) return fd;
  }
}

std::uint16_t tcp_port(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                             : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
}

std::string tcp_local_host(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  char host[NI_MAXHOST] = {};
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  ::getnameinfo(reinterpret_cast<sockaddr*>(&address), size, host, sizeof(host), nullptr, 0, NI_NUMERICHOST);
  return host;
}

}  // namespace kvferry::bench
