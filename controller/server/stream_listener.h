// The listener for streams, which have a lower latency than ZeroMQ: the same messages, each behind its length, over TCP
// or a Unix socket.
#pragma once

#include <memory>
#include <string>

#include "controller/api/listener.h"
#include "controller/directory/sessions.h"
#include "transport/base/result.h"

namespace kvferry::controller {

/// The memory of a peer is bounded: a message of more than kMessageBytesMax is refused and ends its connection; replies
/// to a peer that does not read are dropped and counted beyond 8 MiB. At the maximum number of connections a new one
/// replaces the one without a registered node that was silent for longest.
class StreamListener : public Listener {
 public:
  /// Listens from here on. `sessions` must outlive it.
  /// kInvalidArgument: not an endpoint; kUnavailable: cannot listen on the address, e.g. in use.
  static Result<std::unique_ptr<StreamListener>> bind(const std::string& endpoint, Sessions& sessions);

  /// The actual endpoint, e.g. "stream://127.0.0.1:41234" or "unix:///run/kvferry.sock".
  virtual const std::string& endpoint() const = 0;
};

}  // namespace kvferry::controller
