// A controller without sockets, for nodes of one process. Clients and admin commands work as over sockets.
#pragma once

#include <memory>

#include "controller/api/client.h"
#include "controller/api/status.h"
#include "controller/directory/directory.h"
#include "transport/base/clock.h"

namespace kvferry::controller {

/// Lives as long as its owner or one of its clients. As over sockets, a node is removed when it leaves, or when its
/// client's process() is not called for a lease; the process() of the other clients checks the leases.
/// Threads: any; each client has one owner. Calls of several threads wait for each other, for microseconds.
class EmbeddedController {
 public:
  /// `clock` must outlive the controller and its clients.
  static std::shared_ptr<EmbeddedController> make(const DirectoryOptions& options, const Clock& clock);
  virtual ~EmbeddedController() = default;

  /// `options.controller` is used only in messages. lookup_timeout_ms is ignored: each lookup is answered before
  /// lookup() returns, and its event comes with the next process().
  virtual std::unique_ptr<Client> connect(ClientOptions options) = 0;
  virtual Status status() = 0;
};

}  // namespace kvferry::controller
