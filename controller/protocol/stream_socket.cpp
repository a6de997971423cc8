#include "controller/protocol/stream_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <memory>
#include <vector>

namespace kvferry::controller {
namespace {

constexpr int kBacklog = 4096;
constexpr int kSocketFlags = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;

struct FreeAddrinfo {
  void operator()(addrinfo* info) const { ::freeaddrinfo(info); }
};
using Resolved = std::unique_ptr<addrinfo, FreeAddrinfo>;

Result<Resolved> addresses_of(const std::string& host, std::uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (code != 0)
    return Error{ErrorCode::kNotFound, fmt::format("no address for host '{}': {}", host, ::gai_strerror(code))};
  return Resolved(found);
}

std::string numeric_host(const sockaddr* address, socklen_t bytes) {
  char host[NI_MAXHOST] = "";
  ::getnameinfo(address, bytes, host, sizeof(host), nullptr, 0, NI_NUMERICHOST);
  return host;
}

void set_connection_options(int fd) {
  const auto set = [fd](int level, int option, int value) { ::setsockopt(fd, level, option, &value, sizeof(value)); };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);  // frees dead sockets; heartbeats tell the living from the dead, and sooner
  set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
}

sockaddr_un unix_address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), std::min(path.size(), sizeof(address.sun_path) - 1));
  return address;
}

Error cannot_listen(std::string_view where, std::string_view why) {
  return {ErrorCode::kUnavailable, fmt::format("can't listen on {}: {}", where, why)};
}

Result<BoundSocket> listen_on_path(const std::string& path) {
  const std::string endpoint = "unix://" + path;
  // Two that start at once must not both take the path for a dead one's. The lock ends with its process.
  const std::string lock_path = path + ".lock";
  OwnedFd lock(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock) return cannot_listen(endpoint, fmt::format("{}: {}", lock_path, std::strerror(errno)));
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0)
    return cannot_listen(endpoint, "Address already in use by a living controller");
  const sockaddr_un address = unix_address(path);
  const auto* plain = reinterpret_cast<const sockaddr*>(&address);
  struct stat file {};
  if (::lstat(path.c_str(), &file) == 0) {
    if (!S_ISSOCK(file.st_mode)) return cannot_listen(endpoint, "there is a file that is not a socket");
    const OwnedFd probe(::socket(AF_UNIX, kSocketFlags, 0));
    if (::connect(probe.get(), plain, sizeof(address)) == 0 || errno != ECONNREFUSED)
      return cannot_listen(endpoint, "Address already in use");
    ::unlink(path.c_str());
  }
  OwnedFd socket(::socket(AF_UNIX, kSocketFlags, 0));
  if (!socket || ::bind(socket.get(), plain, sizeof(address)) != 0 || ::listen(socket.get(), kBacklog) != 0)
    return cannot_listen(endpoint, std::strerror(errno));
  return BoundSocket{std::move(socket), std::move(lock), endpoint};
}

Result<BoundSocket> listen_on_port(const StreamAddress& address) {
  const bool is_everywhere = address.host == "*";
  const std::string where = fmt::format("stream://{}:{}", address.host, address.port);
  std::string why = "no address";
  // "::" hears IPv4 as well, where the host has IPv6 at all.
  for (const std::string& host :
       is_everywhere ? std::vector<std::string>{"::", "0.0.0.0"} : std::vector{address.host}) {
    const Result<Resolved> resolved = addresses_of(host, address.port, AI_PASSIVE);
    if (!resolved) return cannot_listen(where, resolved.error().what);
    for (const addrinfo* info = resolved->get(); info != nullptr; info = info->ai_next) {
      OwnedFd socket(::socket(info->ai_family, kSocketFlags, 0));
      const int yes = 1;
      const int only_ip6 = is_everywhere ? 0 : 1;
      ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
      if (info->ai_family == AF_INET6)
        ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &only_ip6, sizeof(only_ip6));
      if (!socket || ::bind(socket.get(), info->ai_addr, info->ai_addrlen) != 0 ||
          ::listen(socket.get(), kBacklog) != 0) {
        why = std::strerror(errno);
        continue;
      }
      sockaddr_storage bound{};
      socklen_t bytes = sizeof(bound);
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bound), &bytes);
      const std::string numeric = numeric_host(reinterpret_cast<sockaddr*>(&bound), bytes);
      const std::uint16_t port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                                                   : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
      return BoundSocket{
          std::move(socket), OwnedFd(),
          fmt::format("stream://{}:{}", numeric.find(':') == std::string::npos ? numeric : "[" + numeric + "]", port)};
    }
  }
  return cannot_listen(where, why);
}

}  // namespace

Result<BoundSocket> listen_on(const StreamAddress& address) {
  return address.is_unix() ? listen_on_path(address.path) : listen_on_port(address);
}

Result<OwnedFd> begin_connect(const StreamAddress& address) {
  const auto failed = [] { return Error{ErrorCode::kUnavailable, std::strerror(errno)}; };
  if (address.is_unix()) {
    const sockaddr_un to = unix_address(address.path);
    OwnedFd socket(::socket(AF_UNIX, kSocketFlags, 0));
    if (!socket || ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)) != 0) return failed();
    return socket;
  }
  const Result<Resolved> resolved = addresses_of(address.host, address.port, AI_NUMERICHOST);
  if (!resolved) return resolved.error();
  OwnedFd socket(::socket((*resolved)->ai_family, kSocketFlags, 0));
  if (!socket) return failed();
  set_connection_options(socket.get());
  if (::connect(socket.get(), (*resolved)->ai_addr, (*resolved)->ai_addrlen) != 0 && errno != EINPROGRESS)
    return failed();
  return socket;
}

Result<std::string> resolve(const std::string& host) {
  const Result<Resolved> resolved = addresses_of(host, 0, 0);
  if (!resolved) return resolved.error();
  return numeric_host((*resolved)->ai_addr, (*resolved)->ai_addrlen);
}

bool is_numeric(const std::string& host) { return static_cast<bool>(addresses_of(host, 0, AI_NUMERICHOST)); }

OwnedFd accept_from(int listener) {
  OwnedFd socket(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket) set_connection_options(socket.get());
  return socket;
}

void append_frame(std::string& out, std::string_view message) {
  const auto length = static_cast<std::uint32_t>(message.size());
  for (unsigned shift = 0; shift < 8 * kLengthBytes; shift += 8) out.push_back(static_cast<char>(length >> shift));
  out.append(message);
}

std::uint32_t frame_length(std::string_view bytes) {
  std::uint32_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    length |= std::uint32_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  return length;
}

}  // namespace kvferry::controller
