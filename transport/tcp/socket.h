// Socket operations that only the TCP backend needs; the others are in transport/base/net/tcp_socket.h.
#pragma once

#include <cstdint>
#include <vector>

#include "transport/base/net/tcp_socket.h"

namespace kvferry::tcp {

/// Returns the addresses at which peers can reach the listener, the most useful first. A listener on all interfaces has
/// all addresses of this host; loopback is the last one, because it reaches this host only.
std::vector<net::HostPort> reachable_addresses(const net::HostPort& listening_on);

/// Returns true if both ends of the connection have the same address.
bool is_same_host(int fd);
/// Selects a simple congestion control algorithm for a connection within one host, where congestion cannot occur. Other
/// algorithms may take reordering by two processors for losses, or pace the sender (BBR: a quarter of the rate).
void skip_congestion_control_within_host(int fd);
/// Returns the number of sent bytes that the peer's host has not acknowledged.
std::uint64_t unacknowledged_bytes(int fd);

}  // namespace kvferry::tcp
