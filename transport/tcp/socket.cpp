#include "transport/tcp/socket.h"

#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <string_view>

namespace kvferry::tcp {

std::vector<net::HostPort> reachable_addresses(const net::HostPort& listening_on) {
  constexpr std::size_t kAddressesMax = 16;
  const bool is_any_ipv4 = listening_on.host == "0.0.0.0";
  if (listening_on.host != "::" && !is_any_ipv4) return {listening_on};
  std::vector<net::HostPort> reachable;
  for (const std::string& host : net::interface_addresses()) {
    const bool is_ipv6 = host.find(':') != std::string::npos;
    if (reachable.size() + 1 < kAddressesMax && !(is_ipv6 && is_any_ipv4))
      reachable.push_back({host, listening_on.port});
  }
  reachable.push_back({"127.0.0.1", listening_on.port});
  return reachable;
}

bool is_same_host(int fd) { return net::local_address(fd).host == net::peer_address(fd).host; }

void skip_congestion_control_within_host(int fd) {
  constexpr std::string_view kSimplest = "reno";  // needs no privilege
  if (is_same_host(fd)) ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kSimplest.data(), kSimplest.size());
}

std::uint64_t unacknowledged_bytes(int fd) {
  int bytes = 0;
  return ::ioctl(fd, SIOCOUTQ, &bytes) == 0 && bytes > 0 ? static_cast<std::uint64_t>(bytes) : 0;
}

}  // namespace kvferry::tcp
