#include "transport/tcp/socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

namespace kvferry::tcp {
namespace {

constexpr int kBacklog = 256;
constexpr std::size_t kEndpointsMax = 16;

struct FreeAddrinfo {
  void operator()(addrinfo* info) const { ::freeaddrinfo(info); }
};
using Resolved = std::unique_ptr<addrinfo, FreeAddrinfo>;

Result<Resolved> resolve(const std::string& host, std::uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (code != 0)
    return Error{ErrorCode::kInvalidArgument, fmt::format("no address for host '{}': {}", host, ::gai_strerror(code))};
  return Resolved(found);
}

std::string numeric_host(const sockaddr* address, socklen_t bytes) {
  char host[NI_MAXHOST] = "";
  ::getnameinfo(address, bytes, host, sizeof(host), nullptr, 0, NI_NUMERICHOST);
  return host;
}

std::uint16_t bound_port(int fd) {
  sockaddr_storage address{};
  socklen_t bytes = sizeof(address);
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &bytes);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port
                                             : reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

/// Returns the addresses of all interfaces that are up; the loopback comes last, since only this host reaches it.
std::vector<Endpoint> interface_endpoints(int family, std::uint16_t port) {
  std::vector<Endpoint> endpoints;
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) == 0) {
    for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
      if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0 || (one->ifa_flags & IFF_LOOPBACK) != 0) continue;
      const bool is_ip6 = one->ifa_addr->sa_family == AF_INET6;
      if ((one->ifa_addr->sa_family != AF_INET && !is_ip6) || (is_ip6 && family == AF_INET)) continue;
      if (is_ip6 && IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(one->ifa_addr)->sin6_addr))
        continue;  // means something else on every host
      if (endpoints.size() + 1 < kEndpointsMax)
        endpoints.push_back({numeric_host(one->ifa_addr, is_ip6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in)), port});
    }
    ::freeifaddrs(all);
  }
  endpoints.push_back({"127.0.0.1", port});
  return endpoints;
}

}  // namespace

Result<Listening> listen_on(const std::string& host, std::uint16_t port) {
  const bool is_everywhere = host.empty() || host == "::" || host == "0.0.0.0";
  std::string last = "no address";
  // A socket on "::" accepts IPv4 as well, if the host has IPv6.
  const std::vector<std::string> hosts = host.empty() ? std::vector<std::string>{"::", "0.0.0.0"} : std::vector{host};
  for (const std::string& one : hosts) {
    Result<Resolved> resolved = resolve(one, port, AI_PASSIVE);
    if (!resolved) return std::move(resolved).error();
    for (const addrinfo* info = resolved->get(); info != nullptr; info = info->ai_next) {
      OwnedFd fd(::socket(info->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
      const int yes = 1;
      const int no = 0;
      ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
      if (info->ai_family == AF_INET6) ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof(no));
      if (fd.get() < 0 || ::bind(fd.get(), info->ai_addr, info->ai_addrlen) != 0 || ::listen(fd.get(), kBacklog) != 0) {
        last = std::strerror(errno);
        continue;
      }
      const std::uint16_t bound = bound_port(fd.get());
      std::vector<Endpoint> endpoints =
          is_everywhere ? interface_endpoints(info->ai_family, bound)
                        : std::vector<Endpoint>{{numeric_host(info->ai_addr, info->ai_addrlen), bound}};
      return Listening{std::move(fd), std::move(endpoints)};
    }
  }
  return Error{ErrorCode::kUnavailable,
               fmt::format("cannot listen on {} port {}: {}", host.empty() ? "any interface" : host, port, last)};
}

Result<OwnedFd> begin_connect(const Endpoint& endpoint) {
  Result<Resolved> resolved = resolve(endpoint.host, endpoint.port, AI_NUMERICHOST);  // never asks a resolver
  if (!resolved) return std::move(resolved).error();
  const addrinfo& info = **resolved;
  OwnedFd fd(::socket(info.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (fd.get() < 0) return Error{ErrorCode::kUnavailable, fmt::format("no socket: {}", std::strerror(errno))};
  set_connection_options(fd.get());
  if (::connect(fd.get(), info.ai_addr, info.ai_addrlen) != 0 && errno != EINPROGRESS)
    return Error{ErrorCode::kPeerLost, std::strerror(errno)};
  return fd;
}

std::string connect_error(int fd) {
  int code = 0;
  socklen_t bytes = sizeof(code);
  ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &bytes);
  return code == 0 ? "" : std::strerror(code);
}

void set_connection_options(int fd) {
  const auto set = [fd](int level, int option, int value) { ::setsockopt(fd, level, option, &value, sizeof(value)); };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  // For what is idle; where something is owed the links look themselves, and sooner.
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
}

bool is_same_host(int fd) {
  const auto host_of = [fd](auto get_name) {
    sockaddr_storage name{};
    socklen_t bytes = sizeof(name);
    return get_name(fd, reinterpret_cast<sockaddr*>(&name), &bytes) == 0
               ? numeric_host(reinterpret_cast<const sockaddr*>(&name), bytes)
               : "";
  };
  return host_of(::getsockname) == host_of(::getpeername);
}

void skip_congestion_control_within_host(int fd) {
  constexpr std::string_view kSimplest = "reno";  // which every process may choose
  if (is_same_host(fd)) ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kSimplest.data(), kSimplest.size());
}

std::uint64_t unacknowledged_bytes(int fd) {
  int bytes = 0;
  return ::ioctl(fd, SIOCOUTQ, &bytes) == 0 && bytes > 0 ? static_cast<std::uint64_t>(bytes) : 0;
}

}  // namespace kvferry::tcp
