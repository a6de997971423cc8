// The way in over ZeroMQ: a ROUTER.
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
  /// kInvalidArgument: not an endpoint; kUnavailable: the address can't be listened on, e.g. port in use.
  static Result<std::unique_ptr<ZmqListener>> bind(const std::string& endpoint, Sessions& sessions);

  /// Where it listens in fact, e.g. "tcp://127.0.0.1:41234".
  virtual const std::string& endpoint() const = 0;
};

}  // namespace kvferry::controller
