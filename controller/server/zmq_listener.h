// The listener for ZeroMQ, with a ROUTER socket.
#pragma once

#include <memory>
#include <string>

#include "controller/api/listener.h"
#include "controller/directory/sessions.h"
#include "transport/base/result.h"

namespace kvferry::controller {

class ZmqListener : public Listener {
 public:
  /// Listens from here on. `sessions` must outlive it.
  /// kInvalidArgument: not an endpoint; kUnavailable: cannot listen on the address, e.g. port in use.
  static Result<std::unique_ptr<ZmqListener>> bind(const std::string& endpoint, Sessions& sessions);

  /// The actual endpoint, e.g. "tcp://127.0.0.1:41234".
  virtual const std::string& endpoint() const = 0;
};

}  // namespace kvferry::controller
