// The listeners for nodes. One uses ZeroMQ. The other has a lower latency: it uses streams (TCP or a Unix socket),
// which carry the same messages, each after its length.
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
/// With a cluster key, only peers that have the same key can connect over tcp://.
Result<std::unique_ptr<BoundListener>> listen_zmq(const std::string& endpoint, Sessions& sessions,
                                                  const std::optional<net::ClusterKey>& key = {});

/// The memory for each peer is bounded: a message of more than kMessageBytesMax is refused and ends its connection;
/// replies to a peer that does not read are dropped and counted while 8 MiB wait. At the maximum number of connections,
/// a new one replaces the one that was silent for longest among those without a registered node.
Result<std::unique_ptr<BoundListener>> listen_stream(const std::string& endpoint, Sessions& sessions);

}  // namespace kvferry::controller
