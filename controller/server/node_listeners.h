// The listeners for nodes. One uses ZeroMQ. The other has a lower latency: it uses streams (TCP or a Unix socket),
// which carry the same messages, each after its length.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "controller/api/listener.h"
#include "controller/directory/sessions.h"
#include "transport/base/clock.h"
#include "transport/base/net/cluster_key.h"
#include "transport/base/result.h"

namespace kvferry::controller {

/// The returned listener already listens. Its address is e.g. "tcp://127.0.0.1:41234" or "ipc:///run/kvferry.sock".
/// `sessions` and `clock` must outlive the listener. kInvalidArgument: `endpoint` is malformed, or `key` is a member's
/// key and `endpoint` is tcp://; kUnavailable: the listener cannot listen on the address, e.g. because the port is in
/// use. With a cluster key, only peers whose key the controller accepts can connect over tcp://.
Result<std::unique_ptr<BoundListener>> listen_zmq(const std::string& endpoint, Sessions& sessions, const Clock& clock,
                                                  const std::optional<net::ClusterKey>& key = {});

/// Same as listen_zmq(), but for stream://HOST:PORT and unix:///PATH, and takes no cluster key. A message of more than
/// kMessageBytesMax bytes is refused and ends its connection. A reply is dropped and counted if earlier replies to its
/// peer are unsent and the unsent replies would exceed 8 MiB. If the number of connections is at its maximum, a new
/// connection replaces the one that has been silent longest among the connections without a registered node; if there
/// is none, the new connection is closed.
Result<std::unique_ptr<BoundListener>> listen_stream(const std::string& endpoint, Sessions& sessions,
                                                     const Clock& clock);

}  // namespace kvferry::controller
