// A queue of tasks from any thread to the owner of the state that the tasks touch.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/base/net/event_fd.h"

namespace kvferry {

/// Tasks for the owner of some state: one thread, or whichever thread holds the state's lock. Threads: any may call
/// post(), has_tasks() and wake(); only the owner calls run() and prepare_to_sleep().
class TaskInbox {
 public:
  using Task = std::function<void()>;

  void post(Task task) {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
      has_tasks_.store(true, std::memory_order_release);
    }
    wake_.set();
  }
  /// Runs the posted tasks in their order. Returns whether there were any.
  bool run() {
    if (!has_tasks()) return false;
    std::vector<Task> tasks;
    {
      const std::lock_guard lock(mutex_);
      has_tasks_.store(false, std::memory_order_relaxed);
      tasks = std::exchange(tasks_, {});
    }
    for (const Task& task : tasks) task();
    return true;
  }
  bool has_tasks() const { return has_tasks_.load(std::memory_order_acquire); }
  /// Clears wake(). Returns true if no task was posted since the last run(), so that the owner may sleep until wake()
  /// is readable.
  bool prepare_to_sleep() {
    wake_.clear();
    return !has_tasks();
  }
  /// Returns the event on which the owner sleeps. The event is readable from a call of post() until it is cleared.
  EventFd& wake() { return wake_; }

 private:
  std::mutex mutex_;
  std::vector<Task> tasks_;
  std::atomic<bool> has_tasks_{false};
  EventFd wake_;
};

}  // namespace kvferry
