// Sockets as this backend wants them: non-blocking, without Nagle's delay, and hosts as numbers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/base/owned_fd.h"
#include "transport/base/result.h"
#include "transport/tcp/messages.h"

namespace kvferry::tcp {

struct Listening {
  OwnedFd socket;
  std::vector<Endpoint> endpoints;  // how peers may reach it, the most useful first
};

/// May ask the resolver, so it may block. `host` empty, "0.0.0.0" or "::": every interface.
/// kInvalidArgument: no such host; kUnavailable: it can't be bound.
Result<Listening> listen_on(const std::string& host, std::uint16_t port);

/// Begins to connect; the socket is writable when that is decided, and connect_error() says how.
Result<OwnedFd> begin_connect(const Endpoint& endpoint);
/// Empty: connected.
std::string connect_error(int fd);

/// What every connection gets, on both sides.
void set_connection_options(int fd);
/// Both ends of a connection have the same address.
bool is_same_host(int fd);
/// For an open connection: within one host nothing is ever congested, but the system's algorithm may take the order in
/// which two processors deliver for losses, or pace what it sends (BBR: a quarter of the rate).
void skip_congestion_control_within_host(int fd);
/// Bytes that were written and have not been acknowledged by the peer's host.
std::uint64_t unacknowledged_bytes(int fd);

}  // namespace kvferry::tcp
