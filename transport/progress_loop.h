// The progress thread of a backend that uses sockets. A thread that waits for completions can do the work of the
// progress thread instead.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include "transport/base/clock.h"
#include "transport/base/net/event_fd.h"
#include "transport/task_inbox.h"

namespace kvferry {

/// One lock guards all of the owner's state, so a backend needs no lock of its own. The progress thread holds this lock
/// while it works; call() holds it while a task runs; a caller of drive() (the driver) holds it while it does the
/// progress thread's work. While there is a driver, the progress thread is parked: it waits outside the loop.
class ProgressLoop {
 public:
  /// The backend. All methods are called under the loop's lock.
  class Owner {
   public:
    virtual ~Owner() = default;
    /// Handles events of a descriptor that was given to watch() with `tag`. Events may still come shortly after
    /// unwatch().
    virtual void on_ready(std::uint64_t tag, std::uint32_t events) = 0;
    /// Does a bounded amount of the work that is queued or due. Returns true if advance() should be called again soon.
    virtual bool advance(TimeNs now) = 0;
    /// Returns the time at which advance() must be called even if no descriptor becomes ready, or kNever.
    virtual TimeNs next_deadline() const = 0;
    /// Called with true when the driver begins to poll without sleeping, and with false before the driver may sleep or
    /// leaves: from then on, peers must wake the loop.
    virtual void set_spinning(bool is_spinning) = 0;
    /// Returns whether the task of call() that has just run left work for advance().
    virtual bool needs_advance() const { return false; }
  };
  static constexpr TimeNs kNever = INT64_MAX;

  /// `spin_ns`: how long a driver polls before it sleeps. `look_ns`: time between a polling driver's checks of the
  /// descriptors; 0: the driver checks the descriptors in every round.
  ProgressLoop(Owner& owner, const char* thread_name, TimeNs spin_ns, TimeNs look_ns);
  ~ProgressLoop();
  ProgressLoop(const ProgressLoop&) = delete;
  ProgressLoop& operator=(const ProgressLoop&) = delete;

  void start();
  /// Joins the thread and makes drive() return. When stop() returns, all tasks of call() have run. Afterwards
  /// needs_advance() is the only method of the owner that the loop calls, and call() still runs its task. Idempotent.
  void stop();

  /// From now on the descriptor's events are passed to Owner::on_ready(). Returns false with errno if the kernel can't
  /// watch the descriptor, e.g. because its limit on watched descriptors (fs.epoll.max_user_watches) is reached. May be
  /// called only under the loop's lock or before start(). `tag` must not be 0.
  [[nodiscard]] bool watch(int fd, std::uint32_t epoll_events, std::uint64_t tag);
  void unwatch(int fd);
  /// Makes drive() also return while `fd` is readable. The progress thread does not wait for `fd`. May be called by any
  /// thread.
  void add_wakeup_fd(int fd);
  /// Makes the thread that runs the loop call advance() soon, also if it sleeps. May be called only under the loop's
  /// lock.
  void kick() { inbox_.wake().set(); }

  /// May be called by any thread that does not hold the loop's lock. Runs the task under the lock: at once if the lock
  /// is free, otherwise soon. Tasks run in the order of the calls. Waits for the lock only once stop() was called.
  void call(TaskInbox::Task task);
  /// May be called by any thread. Does the loop's work until is_over() returns true, the time has passed, a descriptor
  /// of add_wakeup_fd() is readable or stop() is called. is_over() is called often. Returns the last result of
  /// is_over(), or nullopt at once if another thread is in drive().
  std::optional<bool> drive(TimeNs timeout_ns, const std::function<bool()>& is_over);

 private:
  void thread_main();
  /// Runs the posted tasks once stop() was called, because no other thread may look into the inbox any more.
  void run_leftovers();
  bool look(int timeout_ms, bool is_driver);
  void park();
  /// Sleeps until a descriptor of watch() or of add_wakeup_fd() is readable, or the time has passed. Returns true if a
  /// descriptor of add_wakeup_fd() is readable.
  bool wait_for_wakeup_fds(int timeout_ms) const;
  bool is_driven() const;

  Owner& owner_;
  const char* const thread_name_;
  const TimeNs spin_ns_;
  const TimeNs look_ns_;
  const SteadyClock clock_;
  const int epoll_fd_;
  const int wakeup_fd_;  // epoll descriptor that waits for epoll_fd_ and the descriptors of add_wakeup_fd()
  std::atomic<bool> has_wakeup_fds_{false};

  std::mutex mutex_;  // the loop's lock, under which the owner is called
  TaskInbox inbox_;   // its descriptor also signals kick(), stop() and a driver that takes over
  std::atomic<bool> is_stopping_{false};

  std::mutex driver_mutex_;
  // A driver sets is_driving_, then reads is_parked_ and wakes the progress thread if it is not parked; the progress
  // thread clears is_parked_, then reads is_driving_. So the progress thread does not stay in epoll beside a driver:
  // one of the two could receive an event that the other one is to handle.
  std::atomic<bool> is_driving_{false};
  std::atomic<bool> is_parked_{true};  // whether the thread is parked; also true before the thread is started
  std::atomic<TimeNs> driven_at_{0};
  // Whether the driver has slept, so that it wakes the parked thread at the end of drive(). Otherwise the parked thread
  // looks every kHandBackNs by itself whether drive() has ended, which saves drive() a system call.
  std::atomic<bool> has_driver_slept_{false};
  std::mutex park_mutex_;
  std::condition_variable unpark_;
  std::thread thread_;
};

}  // namespace kvferry
