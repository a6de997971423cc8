// Finds out whether a listener requires the cluster key.
#pragma once

#include "transport/base/net/host_port.h"

namespace kvferry::cli {

/// Returns whether the listener refuses a peer without the cluster key. It does if its ZeroMQ greeting names the
/// mechanism CURVE, if it is the controller's HTTP API and answers with status 401, or if it is a worker's TCP port and
/// refuses a TLS handshake with another key. Connects up to four times and waits up to a second for each read of an
/// answer.
bool asks_for_key(const net::HostPort& address);

}  // namespace kvferry::cli
