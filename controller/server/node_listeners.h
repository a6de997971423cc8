// The listeners for nodes: ZeroMQ, and streams, which have a lower latency: the same messages, each behind its length,
// over TCP or a Unix socket.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "controller/api/listener.h"
#include "controller/directory/sessions.h"
#include "transport/base/net/cluster_key.h"
#include "transport/base/result.h"

namespace kvferry::controller {

/// The returned listener already listens. Its address is e.g. "tcp://127.0.0.1:41234" or "unix:///run/kvferry.sock".
/// `sessions` must outlive the listener.
/// kInvalidArgument: `endpoint` is malformed; kUnavailable: cannot listen on the address, e.g. port in use.
/// With a cluster key only those who have it get through on tcp://.
Result<std::unique_ptr<BoundListener>> listen_zmq(const std::string& endpoint, Sessions& sessions,
                                                  const std::optional<net::ClusterKey>& key = {});

/// The memory of a peer is bounded: a message of more than kMessageBytesMax is refused and ends its connection; replies
/// to a peer that does not read are dropped and counted beyond 8 MiB. At the maximum number of connections a new one
/// replaces the one without a registered node that was silent for longest.
Result<std::unique_ptr<BoundListener>> listen_stream(const std::string& endpoint, Sessions& sessions);

}  // namespace kvferry::controller
