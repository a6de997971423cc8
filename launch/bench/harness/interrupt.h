// Ctrl-C and SIGTERM as a flag that everything that waits looks at, so that memory and child processes are given back.
#pragma once

#include "transport/base/clock.h"
#include "transport/base/result.h"

namespace kvferry::bench {

/// From now on SIGINT and SIGTERM only set the flag. Whoever doesn't look at it is ended by the kernel 3 s later.
void catch_interrupts();
bool is_interrupted();

/// What bounds a wait: now() + timeout, or the user's interrupt.
class Deadline {
 public:
  explicit Deadline(TimeNs timeout_ns);
  /// kTimeout or kCancelled, naming what was waited for.
  Result<void> check(const char* what) const;
  TimeNs left_ns() const;

 private:
  TimeNs end_;
};

}  // namespace kvferry::bench
