// An eventfd with one owner: the wake-up between threads, and the readable flag that callers wait on.
#pragma once

namespace kvferry {

/// Threads: set() and clear() from any thread; both never block.
class EventFd {
 public:
  EventFd();
  ~EventFd();
  EventFd(const EventFd&) = delete;
  EventFd& operator=(const EventFd&) = delete;

  void set();
  void clear();
  int fd() const { return fd_; }

 private:
  int fd_;
};

}  // namespace kvferry
