// The way in over a stream, for the critical path: the same messages, each behind its length, over TCP or a Unix
// socket.
#pragma once

#include <memory>
#include <string>

#include "controller/api/listener.h"
#include "controller/directory/sessions.h"
#include "transport/base/result.h"

namespace kvferry::controller {

/// What a peer can pile up here is bounded: a message that claims more than kMessageBytesMax is refused in a sentence
/// and ends its connection; answers to a peer that doesn't read are dropped and counted from 8 MiB on. Where all
/// connections are taken, a new one takes the place of the one that was silent for longest and speaks for no node.
class StreamListener : public Listener {
 public:
  /// Listens from here on. `sessions` must outlive it.
  /// kInvalidArgument: not an endpoint; kUnavailable: the address can't be listened on, e.g. in use.
  static Result<std::unique_ptr<StreamListener>> bind(const std::string& endpoint, Sessions& sessions);

  /// Where it listens in fact, e.g. "stream://127.0.0.1:41234" or "unix:///run/kvferry.sock".
  virtual const std::string& endpoint() const = 0;
};

}  // namespace kvferry::controller
