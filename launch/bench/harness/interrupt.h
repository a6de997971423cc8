// Turns Ctrl-C and SIGTERM into a flag. Most waits check the flag, so that an interrupted benchmark can release its
// memory and end its child processes.
#pragma once

#include "transport/base/clock.h"
#include "transport/base/net/tcp_socket.h"
#include "transport/base/result.h"

namespace kvferry::bench {

/// Makes SIGINT and SIGTERM set the flag. If the process still runs 3 s after the signal, SIGALRM ends it.
void catch_interrupts();
bool is_interrupted();
/// Returns the error kCancelled of a benchmark that a signal has interrupted.
Error interrupted();

/// The limit of a wait: a timeout or the user's interrupt, whichever comes first.
class Deadline {
 public:
  explicit Deadline(TimeNs timeout_ns);
  /// Errors: kTimeout after the timeout, with the message that `what` did not arrive; kCancelled after an interrupt.
  Result<void> check(const char* what) const;

 private:
  TimeNs timeout_;
  TimeNs end_;
};

/// Waits for a connection and returns its blocking socket. Failures: those of Deadline::check().
OwnedFd tcp_accept(const net::TcpListener& listener, const Deadline& deadline);

}  // namespace kvferry::bench
