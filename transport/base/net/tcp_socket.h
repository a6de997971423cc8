// TCP sockets over IPv4 and IPv6. Every connection has TCP_NODELAY and keepalive.
#pragma once

#include <string>
#include <vector>

#include "transport/base/net/host_port.h"
#include "transport/base/owned_fd.h"
#include "transport/base/result.h"

namespace kvferry::net {

struct TcpListener {
  OwnedFd socket;    // non-blocking
  HostPort address;  // numeric host and the port in use
};

/// Listens on `host`, which may be a name; resolving it may block. "" or "*" means all interfaces, over IPv6 and IPv4
/// or, if that fails (for example on a host without IPv6), over IPv4 only. Port 0 selects a free port.
/// kInvalidArgument: `host` cannot be resolved. kUnavailable: the address cannot be bound.
Result<TcpListener> listen_tcp(const std::string& host, std::uint16_t port);

/// Accepts a connection; the new socket is non-blocking. Returns an empty descriptor if no connection is pending or
/// accept() failed (see errno).
OwnedFd accept_tcp(int listener);

/// Starts a non-blocking connection attempt to a numeric address. When the socket is writable, connect_error() returns
/// the outcome. kInvalidArgument: the host is not numeric. kUnavailable: no socket can be made. kPeerLost: the
/// attempt failed at once; the message does not name the address.
Result<OwnedFd> begin_connect_tcp(const HostPort& address);
/// Returns an empty string if the socket is connected, otherwise the reason why it is not.
std::string connect_error(int fd);

/// Resolves `address.host`, tries its addresses in turn, and returns a connected blocking socket. kInvalidArgument: the
/// host cannot be resolved. kUnavailable: no address can be connected to. `timeout_ms`: limit on the time for each
/// address, and later for each send; 0: the system's limit, which may be minutes.
Result<OwnedFd> connect_tcp(const HostPort& address, int timeout_ms = 0);

// Keepalive sends its first probe after 10 s without traffic, then one every 5 s. After 3 unanswered probes, about 25 s
// in all, a connection to a dead host ends.
constexpr int kKeepaliveIdleSeconds = 10;
constexpr int kKeepaliveIntervalSeconds = 5;
constexpr int kKeepaliveProbes = 3;
/// A ZeroMQ connection is closed if sent bytes stay unacknowledged for this long.
constexpr int kUnacknowledgedMs = 5000;
/// Sets TCP_NODELAY and keepalive. On a listening socket, accepted connections inherit the options.
void set_tcp_options(int fd);

HostPort local_address(int fd);
HostPort peer_address(int fd);

/// Returns the numeric addresses of a host, at least one. Blocks during the name lookup.
/// kInvalidArgument: the name cannot be resolved.
Result<std::vector<std::string>> resolve(const std::string& host);
bool is_numeric(const std::string& host);
bool is_loopback(const std::string& numeric_host);

/// Returns the addresses of this host's interfaces that are up, except loopback and IPv6 link-local ones.
std::vector<std::string> interface_addresses();

/// Returns the local address that the kernel would use to reach `host`, over IPv4 if possible. Sends nothing, but may
/// resolve a name.
/// kInvalidArgument: the name cannot be resolved. kUnavailable: there is no route.
Result<std::string> source_address_towards(const std::string& host);

}  // namespace kvferry::net
