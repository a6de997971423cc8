// What the links need of the backend that they belong to.
#pragma once

#include <cstdint>
#include <string>

#include "transport/base/clock.h"
#include "transport/make_transport.h"
#include "transport/tcp/connection.h"
#include "transport/transfer_table.h"

namespace kvferry::tcp {

class LinkHost {
 public:
  virtual ~LinkHost() = default;
  virtual TransferTable& transfer_table() = 0;
  virtual const TcpOptions& options() const = 0;
  /// The `from` of this side's notifications.
  virtual const std::string& source_address() const = 0;
  virtual TimeNs now() const = 0;
  /// Watches the socket from here on.
  virtual Connection& adopt(OwnedFd socket, MessageHandler& handler, bool is_connecting) = 0;
  /// Lets the connection advance soon.
  virtual void wake(Connection& connection) = 0;
  /// The object stays valid until the current call has returned.
  virtual void close(Connection& connection) = 0;
  /// The peer owes an answer: check the links for silence in a while.
  virtual void arm_silence_check() = 0;
};

}  // namespace kvferry::tcp
