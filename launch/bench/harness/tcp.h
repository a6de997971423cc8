// The few socket calls that the benchmark's control connection and its raw-socket limit share.
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
/// "HOST:PORT", "[::1]:PORT"; kInvalidArgument otherwise.
Result<HostPort> parse_host_port(std::string_view text);

/// Each gives a descriptor that the caller closes. kUnavailable: no such host, port in use, nobody listens there.
Result<int> tcp_listen(const std::string& host, std::uint16_t port);
Result<int> tcp_connect(const std::string& host, std::uint16_t port);
/// kTimeout, kCancelled.
Result<int> tcp_accept(int listening, const Deadline& deadline);

std::uint16_t tcp_port(int fd);
/// This side's address of a connected socket, as numbers.
std::string tcp_local_host(int fd);

}  // namespace kvferry::bench
