// Tasks of any thread for the one thread that owns things.
#pragma once

#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/event_fd.h"

namespace kvferry {

/// Threads: post() any, the rest the owner's. Bounded by its users: the transfer_table limits transfers.
class TaskInbox {
 public:
  void post(std::function<void()> task) {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    wake_.set();
  }
  /// Runs what was posted, in order. False: nothing was.
  bool run() {
    std::vector<std::function<void()>> tasks;
    {
      const std::lock_guard lock(mutex_);
      tasks = std::exchange(tasks_, {});
    }
    for (const std::function<void()>& task : tasks) task();
    return !tasks.empty();
  }
  /// Readable after a post() until cleared; clear before run(), so that no post is slept through.
  EventFd& wake() { return wake_; }

 private:
  std::mutex mutex_;
  std::vector<std::function<void()>> tasks_;
  EventFd wake_;
};

}  // namespace kvferry
