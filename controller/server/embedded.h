// A controller without sockets, for nodes of one process: the same client, the same admin commands.
#pragma once

#include <memory>

#include "controller/api/client.h"
#include "controller/directory/directory.h"
#include "controller/api/status.h"
#include "transport/base/clock.h"

namespace kvferry::controller {

/// Lives as long as one of its clients does, or its owner. A node is forgotten as over sockets: when it leaves, or
/// nobody calls its client's process() for a lease; the others' process() sees to it.
/// Threads: any; each client has one owner. A call waits for those of other threads, for microseconds.
class EmbeddedController {
 public:
  /// `clock` must outlive the controller and its clients.
  static std::shared_ptr<EmbeddedController> make(const DirectoryOptions& options, const Clock& clock);
  virtual ~EmbeddedController() = default;

  /// `options.controller` is for messages alone. lookup_timeout_ms counts for nothing: each look-up is answered before
  /// lookup() returns, and its event waits for the next process().
  virtual std::unique_ptr<Client> connect(ClientOptions options) = 0;
  virtual Status status() = 0;
};

}  // namespace kvferry::controller
