// An object that the server's one thread serves in each turn of its loop: a source of messages or requests (ZeroMQ,
// streams, HTTP, engine events), the journal of the state folder, or the link to the other replicas.
#pragma once

#include <string>

#include "transport/base/clock.h"

namespace kvferry::controller {

/// Threads: only the directory's owner thread, which is the server's thread. A listener with threads of its own hands
/// their results over to the owner thread, and wakes it by making fd() readable.
class Listener {
 public:
  virtual ~Listener() = default;

  /// Returns a descriptor that becomes readable when serve() has new input, or a negative number if there is no
  /// descriptor. The descriptor may be edge-triggered, as ZeroMQ's is.
  virtual int fd() const = 0;

  /// Handles waiting input up to a bound, so that no listener starves the others or delays lease checks. Never blocks
  /// or throws, whatever a peer sent. The server calls serve() in each turn of its loop, whether or not fd() is
  /// readable, and sleeps at most 100 ms between two turns. Returns true if input may be left, so that the loop
  /// continues without sleeping.
  virtual bool serve(TimeNs now) = 0;
};

/// A listener with an address of its own.
class BoundListener : public Listener {
 public:
  /// Returns the actual address, with the port in use.
  virtual const std::string& address() const = 0;
};

}  // namespace kvferry::controller
