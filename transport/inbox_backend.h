// Base of the backends whose progress thread polls a library (UCX, NCCL, CUDA). It has the loop that runs posted tasks,
// does the work that is ready, and sleeps when there is none.
#pragma once

#include <poll.h>
#include <pthread.h>

#include <thread>
#include <utility>

#include "transport/backend.h"
#include "transport/base/clock.h"
#include "transport/task_inbox.h"

namespace kvferry {

/// A backend with a thread that runs tasks from an inbox. Threads: any may call post() and join(); only the progress
/// thread calls the protected methods.
class InboxBackend : public Backend {
 public:
  using Backend::Backend;
  void post(Task task) final { inbox_.post(std::move(task)); }
  void join() final {
    if (thread_.joinable()) thread_.join();
  }

 protected:
  /// Runs the posted tasks, does all work that is ready, and sets now_ once. Returns whether there was any work.
  virtual bool turn() = 0;
  virtual bool is_over() const = 0;
  /// Called after a turn without work. This function may sleep. `busy_at`: now_ of the last turn that had work.
  virtual void idle(TimeNs busy_at) = 0;

  /// The progress thread's loop. Returns when is_over() returns true.
  void take_turns(const char* thread_name) {
    ::pthread_setname_np(::pthread_self(), thread_name);
    TimeNs busy_at = now_ = clock_.now();
    while (true) {
      const bool is_busy = turn();
      if (is_over()) return;
      if (is_busy)
        busy_at = now_;
      else
        idle(busy_at);
    }
  }
  /// Sleeps until a task is posted, `fd` (-1: no descriptor) is readable, or `wait_ns` have passed.
  void sleep(int fd, TimeNs wait_ns) {
    const timespec timeout{wait_ns / kSecond, wait_ns % kSecond};
    pollfd fds[] = {{inbox_.wake().fd(), POLLIN, 0}, {fd, POLLIN, 0}};
    ::ppoll(fds, std::size(fds), &timeout, nullptr);
  }

  TaskInbox inbox_;
  TimeNs now_ = 0;
  bool is_stopping_ = false;
  std::thread thread_;  // started by the derived class, whose destructor calls join()
};

}  // namespace kvferry
