// Accepting connections with a deadline. All other socket functions are in transport/base/net/tcp_socket.h.
#pragma once

#include "launch/bench/harness/interrupt.h"
#include "transport/base/net/tcp_socket.h"

namespace kvferry::bench {

using net::HostPort;

/// Waits for a connection and returns its blocking socket. kTimeout, kCancelled: as Deadline::check().
Result<OwnedFd> tcp_accept(const net::TcpListener& listener, const Deadline& deadline);

}  // namespace kvferry::bench
