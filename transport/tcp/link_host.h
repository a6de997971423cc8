// What the links need of the engine they belong to.
#pragma once

#include <cstdint>
#include <string>

#include "transport/base/clock.h"
#include "transport/transfer_table.h"
#include "transport/make_transport.h"
#include "transport/tcp/connection.h"

namespace kvferry::tcp {

class LinkHost {
 public:
  virtual ~LinkHost() = default;
  virtual TransferTable& transfer_table() = 0;
  virtual const TcpOptions& options() const = 0;
  virtual const std::string& signature() const = 0;
  virtual TimeNs now() const = 0;
  /// Watches it from here on.
  virtual Connection& adopt(OwnedFd socket, FrameHandler& handler, bool is_connecting) = 0;
  /// Lets it advance soon.
  virtual void wake(Connection& connection) = 0;
  /// It stays valid until the current call has returned.
  virtual void close(Connection& connection) = 0;
  /// Something is owed: look after it in a while.
  virtual void arm() = 0;
};

}  // namespace kvferry::tcp
