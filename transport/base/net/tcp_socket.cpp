#include "transport/base/net/tcp_socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <cerrno>
#include <cstring>
#include <memory>

namespace kvferry::net {
namespace {

constexpr int kBacklog = 4096;  // limit on connections that wait to be accepted, e.g. after a restart
constexpr int kNonBlocking = SOCK_NONBLOCK | SOCK_CLOEXEC;

struct FreeAddrinfo {
  void operator()(addrinfo* info) const { ::freeaddrinfo(info); }
};
using Resolved = std::unique_ptr<addrinfo, FreeAddrinfo>;

Result<Resolved> resolve(const HostPort& address, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int code = ::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (code != 0) {
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("cannot resolve host '{}': {}", address.host, ::gai_strerror(code))};
  }
  return Resolved(found);
}

HostPort numeric(const sockaddr* address, socklen_t bytes) {
  char host[NI_MAXHOST] = "";
  ::getnameinfo(address, bytes, host, sizeof(host), nullptr, 0, NI_NUMERICHOST);
  const in_port_t port = address->sa_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(address)->sin6_port
                                                        : reinterpret_cast<const sockaddr_in*>(address)->sin_port;
  return {host, ntohs(port)};
}

template <class GetName>
HostPort address_of(int fd, GetName get_name) {
  sockaddr_storage address{};
  socklen_t bytes = sizeof(address);
  auto* const plain = reinterpret_cast<sockaddr*>(&address);
  return get_name(fd, plain, &bytes) == 0 ? numeric(plain, bytes) : HostPort{};
}

void set(int fd, int level, int option, int value) { ::setsockopt(fd, level, option, &value, sizeof(value)); }

}  // namespace

Result<TcpListener> listen_tcp(const std::string& host, std::uint16_t port) {
  const bool is_any = host.empty() || host == "*";
  std::string why = "no address";
  for (const std::string& one : is_any ? std::vector<std::string>{"::", "0.0.0.0"} : std::vector{host}) {
    const Resolved resolved = KVFERRY_TRY(resolve({one, port}, AI_PASSIVE));
    for (const addrinfo* info = resolved.get(); info != nullptr; info = info->ai_next) {
      OwnedFd socket(::socket(info->ai_family, SOCK_STREAM | kNonBlocking, 0));
      set(socket.get(), SOL_SOCKET, SO_REUSEADDR, 1);
      if (info->ai_family == AF_INET6) set(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);  // "::" accepts IPv4 too
      set_tcp_options(socket.get());
      if (socket && ::bind(socket.get(), info->ai_addr, info->ai_addrlen) == 0 &&
          ::listen(socket.get(), kBacklog) == 0) {
        HostPort address = local_address(socket.get());
        return TcpListener{std::move(socket), std::move(address)};
      }
      why = std::strerror(errno);
    }
  }
  return Error{ErrorCode::kUnavailable,
               fmt::format("cannot listen on {}: {}", to_text({is_any ? "*" : host, port}), why)};
}

OwnedFd accept_tcp(int listener) {
  OwnedFd socket(::accept4(listener, nullptr, nullptr, kNonBlocking));
  if (socket) set_tcp_options(socket.get());
  return socket;
}

Result<OwnedFd> begin_connect_tcp(const HostPort& address) {
  const Resolved resolved = KVFERRY_TRY(resolve(address, AI_NUMERICHOST));
  const addrinfo& info = *resolved;
  OwnedFd socket(::socket(info.ai_family, SOCK_STREAM | kNonBlocking, 0));
  if (!socket) return Error{ErrorCode::kUnavailable, fmt::format("cannot create a socket: {}", std::strerror(errno))};
  set_tcp_options(socket.get());
  if (::connect(socket.get(), info.ai_addr, info.ai_addrlen) != 0 && errno != EINPROGRESS)
    return Error{ErrorCode::kPeerLost, fmt::format("cannot connect: {}", std::strerror(errno))};
  return socket;
}

std::string connect_error(int fd) {
  int code = 0;
  socklen_t bytes = sizeof(code);
  ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &bytes);
  return code == 0 ? "" : std::strerror(code);
}

Result<OwnedFd> connect_tcp(const HostPort& address, int timeout_ms) {
  const Resolved resolved = KVFERRY_TRY(resolve(address, 0));
  std::string why;
  for (const addrinfo* info = resolved.get(); info != nullptr; info = info->ai_next) {
    OwnedFd socket(::socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (socket) set_tcp_options(socket.get());
    const timeval limit{timeout_ms / 1000, timeout_ms % 1000 * 1000};
    if (socket) ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    if (socket && ::connect(socket.get(), info->ai_addr, info->ai_addrlen) == 0) return socket;
    why = std::strerror(errno == EINPROGRESS ? ETIMEDOUT : errno);
  }
  return Error{ErrorCode::kUnavailable, fmt::format("cannot connect to {}: {}", to_text(address), why)};
}

void set_tcp_options(int fd) {
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  // Keepalive closes idle connections to dead hosts.
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, kKeepaliveIdleSeconds);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, kKeepaliveIntervalSeconds);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, kKeepaliveProbes);
}

HostPort local_address(int fd) { return address_of(fd, ::getsockname); }
HostPort peer_address(int fd) { return address_of(fd, ::getpeername); }

Result<std::vector<std::string>> resolve(const std::string& host) {
  const Resolved resolved = KVFERRY_TRY(resolve({host, 0}, 0));
  std::vector<std::string> addresses;
  for (const addrinfo* info = resolved.get(); info != nullptr; info = info->ai_next)
    addresses.push_back(numeric(info->ai_addr, info->ai_addrlen).host);
  return addresses;
}

bool is_numeric(const std::string& host) { return static_cast<bool>(resolve({host, 0}, AI_NUMERICHOST)); }

bool is_loopback(const std::string& numeric_host) {
  return numeric_host.starts_with("127.") || numeric_host == "::1" || numeric_host.starts_with("::ffff:127.");
}

std::vector<std::string> interface_addresses() {
  std::vector<std::string> addresses;
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return addresses;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(all, &::freeifaddrs);
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0 || (one->ifa_flags & IFF_LOOPBACK) != 0) continue;
    const int family = one->ifa_addr->sa_family;
    if (family == AF_INET) addresses.push_back(numeric(one->ifa_addr, sizeof(sockaddr_in)).host);
    if (family != AF_INET6) continue;
    // Every host has its own link-local networks, so a link-local address means nothing to a peer.
    if (IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(one->ifa_addr)->sin6_addr)) continue;
    addresses.push_back(numeric(one->ifa_addr, sizeof(sockaddr_in6)).host);
  }
  return addresses;
}

Result<std::string> source_address_towards(const std::string& host) {
  constexpr std::uint16_t kAnyPort = 9;
  const Resolved resolved = KVFERRY_TRY(resolve({host, kAnyPort}, 0));
  for (const int family : {AF_INET, AF_INET6}) {
    for (const addrinfo* info = resolved.get(); info != nullptr; info = info->ai_next) {
      if (info->ai_family != family) continue;
      const OwnedFd socket(::socket(family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
      if (socket && ::connect(socket.get(), info->ai_addr, info->ai_addrlen) == 0)
        return local_address(socket.get()).host;
    }
  }
  return Error{ErrorCode::kUnavailable, fmt::format("no route to host '{}': {}", host, std::strerror(errno))};
}

}  // namespace kvferry::net
