// The socket calls that the benchmark's control connection and its raw-socket engine share.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "launch/bench/harness/interrupt.h"
#include "transport/base/result.h"

namespace kvferry::bench {

struct HostPort {
  std::string host;
  std::uint16_t port = 0;
};
/// Parses "HOST:PORT" or "[::1]:PORT"; kInvalidArgument for anything else.
Result<HostPort> parse_host_port(std::string_view text);

/// Each returns a descriptor that the caller closes. kUnavailable: unknown host, port in use, connection refused.
Result<int> tcp_listen(const std::string& host, std::uint16_t port);
Result<int> tcp_connect(const std::string& host, std::uint16_t port);
/// kTimeout, kCancelled.
Result<int> tcp_accept(int listening, const Deadline& deadline);

std::uint16_t tcp_port(int fd);
/// The numeric address of this side of a connected socket.
std::string tcp_local_host(int fd);

}  // namespace kvferry::bench
