// Wakes a thread that sleeps on file descriptors.
#pragma once

#include <sys/eventfd.h>

#include "transport/base/owned_fd.h"

namespace kvferry::controller {

/// Readable from raise() until clear(). raise() is async-signal-safe.
class WakeUp {
 public:
  WakeUp() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}
  int fd() const { return fd_.get(); }
  void raise() const { ::eventfd_write(fd_.get(), 1); }
  void clear() const {
    eventfd_t count = 0;
    ::eventfd_read(fd_.get(), &count);
  }

 private:
  OwnedFd fd_;
};

}  // namespace kvferry::controller
