// The thread of a node: one loop that polls file descriptors and can be woken up.
#pragma once

#include <poll.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "transport/base/net/event_fd.h"

namespace kvferry {

class PollLoop {
 public:
  /// Does all the work there is, adds the file descriptors to wait for, and returns the longest time to wait for them
  /// in milliseconds, or 0 if the loop should call it again at once.
  using Turn = std::function<int(std::vector<pollfd>& fds)>;

  ~PollLoop() { stop(); }
  void start(Turn turn);
  /// Ends the wait in progress, or the next one at once. Threads: any.
  void wake() { wake_.set(); }
  /// Joins the thread. Idempotent.
  void stop();

 private:
  EventFd wake_{std::nothrow};  // if the process has no descriptor left, wake() does nothing and waits end by timeout
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace kvferry
