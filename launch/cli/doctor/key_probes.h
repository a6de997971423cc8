// Finds out whether a listener requires the cluster key.
#pragma once

#include "transport/base/net/host_port.h"

namespace kvferry::cli {

/// Returns whether the listener refuses a peer without the cluster key: with the mechanism CURVE in ZeroMQ's greeting,
/// with status 401 if it is the controller's HTTP API, or in the TLS handshake of a worker's TCP port. Connects up to
/// four times and waits up to a second for each read of an answer.
bool asks_for_key(const net::HostPort& address);

}  // namespace kvferry::cli
