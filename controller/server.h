// The controller's server: a ZeroMQ ROUTER in front of a Directory.
#pragma once

#include <memory>
#include <string>

#include "controller/directory.h"
#include "controller/status.h"
#include "transport/base/clock.h"
#include "transport/base/result.h"

namespace kvferry::controller {

struct ServerOptions {
  std::string bind = "tcp://127.0.0.1:14600";  // port 0: any free one
  DirectoryOptions directory;
};

/// Whatever a peer sends, the server goes on: a malformed message is counted and dropped, a message of another protocol
/// version is refused in a sentence, replies to a peer that doesn't read are dropped.
/// Threads: one calls run(); stop() from any thread or signal handler.
class Server {
 public:
  /// Listens from here on; nothing is answered before run(). `clock` must outlive the server.
  /// kInvalidArgument: not an endpoint; kUnavailable: the address can't be listened on, e.g. port in use.
  static Result<std::unique_ptr<Server>> bind(const ServerOptions& options, const Clock& clock);
  virtual ~Server() = default;

  /// Where it listens in fact, e.g. "tcp://127.0.0.1:41234".
  virtual const std::string& endpoint() const = 0;
  /// Serves until stop() was called, also if that was before run().
  virtual void run() = 0;
  /// Async-signal-safe.
  virtual void stop() = 0;
};

}  // namespace kvferry::controller
