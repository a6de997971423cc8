// An eventfd with one owner. It wakes a thread that waits for file descriptors.
#pragma once

#include <new>

#include "transport/base/owned_fd.h"

namespace kvferry {

/// The descriptor is readable from set() until clear(). Threads: any; no call blocks. set() is async-signal-safe.
class EventFd {
 public:
  /// Aborts if the process has no file descriptor left.
  EventFd();
  /// If the process has no file descriptor left, fd() is negative, and set() and clear() do nothing.
  explicit EventFd(std::nothrow_t);

  int fd() const { return fd_.get(); }
  void set() const;
  void clear() const;

 private:
  OwnedFd fd_;
};

}  // namespace kvferry
