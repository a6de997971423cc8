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
  /// A turn does pending work, adds the file descriptors to wait for, and returns the longest time to wait for them in
  /// milliseconds, or 0 if the loop should start the next turn at once.
  using Turn = std::function<int(std::vector<pollfd>& fds)>;
  /// Called when no descriptor became ready in that time. Returns false if the loop should wait as long once more.
  using IsDue = std::function<bool()>;

  ~PollLoop() { stop(); }
  void start(
      Turn turn, IsDue is_due = [] { return true; });
  /// Makes the loop begin another turn without waiting for its file descriptors. May be called from any thread.
  void wake() { wake_.set(); }
  /// Ends the loop and joins its thread. A second call does nothing.
  void stop();

 private:
  EventFd wake_{std::nothrow};  // if the process has no descriptor left, wake() does nothing and waits end by timeout
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace kvferry
