// Ctrl-C and SIGTERM as a flag that every wait checks, so that memory and child processes are released.
#pragma once

#include "transport/base/clock.h"
#include "transport/base/net/tcp_socket.h"
#include "transport/base/result.h"

namespace kvferry::bench {

/// From now on SIGINT and SIGTERM only set the flag. The kernel ends the process 3 s later if it still runs.
void catch_interrupts();
bool is_interrupted();

/// The limit of a wait: a timeout or the user's interrupt, whichever comes first.
class Deadline {
 public:
  explicit Deadline(TimeNs timeout_ns);
  /// Returns kTimeout, with a sentence that names `what`, or kCancelled.
  Result<void> check(const char* what) const;

 private:
  TimeNs end_;
};

/// Waits for a connection and returns its blocking socket. Failures: as Deadline::check().
OwnedFd tcp_accept(const net::TcpListener& listener, const Deadline& deadline);

}  // namespace kvferry::bench
