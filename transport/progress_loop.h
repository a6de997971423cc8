// The progress thread of a backend that lives on sockets, and the way for a waiting caller to do its work instead.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "transport/base/clock.h"
#include "transport/event_fd.h"

namespace kvferry {

/// One lock guards all of the owner's state; whoever holds it is the loop: the progress thread, a caller in call(), or
/// a caller in drive(). So a backend needs no lock of its own, and an idle one answers a call without waking a thread.
class ProgressLoop {
 public:
  /// The backend. Everything is called under the loop's lock.
  class Owner {
   public:
    virtual ~Owner() = default;
    /// `tag` is what watch() was given; one whose descriptor was unwatched meanwhile may still come.
    virtual void on_ready(std::uint64_t tag, std::uint32_t events) = 0;
    /// Does a bounded piece of what is queued or due. True: there is more, or something was done; call again soon.
    virtual bool advance(TimeNs now) = 0;
    /// When advance() is wanted although nothing becomes ready. kNever: not by itself.
    virtual TimeNs next_deadline() const = 0;
    /// A caller polls without sleeping from now on (true), or will sleep (false): then peers must wake it.
    virtual void set_spinning(bool is_spinning) = 0;
  };
  static constexpr TimeNs kNever = INT64_MAX;

  /// `spin_ns`: how long a caller in drive() polls before it sleeps. `look_ns`: how often it looks at the descriptors
  /// while it does; 0: every time.
  ProgressLoop(Owner& owner, const char* thread_name, TimeNs spin_ns, TimeNs look_ns);
  ~ProgressLoop();
  ProgressLoop(const ProgressLoop&) = delete;
  ProgressLoop& operator=(const ProgressLoop&) = delete;

  void start();
  /// Joins the thread and sends the caller in drive() home; what was posted with call() has run when it returns. The
  /// owner is not called afterwards, but call() still runs its task. Idempotent.
  void stop();

  /// Loop only. `tag` must not be 0.
  void watch(int fd, std::uint32_t epoll_events, std::uint64_t tag);
  void rewatch(int fd, std::uint32_t epoll_events, std::uint64_t tag);
  void unwatch(int fd);
  /// Any thread: a driver that sleeps also wakes, and leaves, while `fd` is readable; the thread does not.
  void add_wakeup_fd(int fd);
  /// Loop only: lets the thread look at what a call left to do.
  void kick() { wake_.set(); }

  /// Any thread but never from within the loop: runs the task in the loop, here and now if nobody else is in it, else
  /// soon, in the order of calls. Never blocks for longer than a task takes.
  void call(std::function<void()> task);
  /// The same, and returns when it has run.
  void call_and_wait(const std::function<void()>& task);
  /// Any thread: does the loop's work until `is_over` (checked often, without the lock) or the time has passed; false
  /// then. Nothing at once if another thread drives already.
  std::optional<bool> drive(TimeNs timeout_ns, const std::function<bool()>& is_over);

 private:
  void thread_main();
  /// Under the lock.
  void run_inbox();
  /// Once the thread has stopped nobody else looks into the inbox.
  void run_leftovers();
  bool look(int timeout_ms, bool is_driver);
  void park();
  /// A driver's sleep until something is to be looked at (false) or a guest is readable (true).
  bool sleep_with_guests(int timeout_ms) const;
  bool is_driven() const;

  Owner& owner_;
  const char* const thread_name_;
  const TimeNs spin_ns_;
  const TimeNs look_ns_;
  const SteadyClock clock_;
  const int epoll_fd_;
  const int guests_fd_;  // of epoll_fd_ and the guests
  std::atomic<bool> has_guests_{false};
  EventFd wake_;

  std::mutex mutex_;  // the loop
  std::mutex inbox_mutex_;
  std::vector<std::function<void()>> inbox_;
  std::atomic<bool> has_inbox_{false};
  std::atomic<bool> is_stopping_{false};

  std::mutex driver_mutex_;
  // A driver says that it drives, then looks whether the thread is parked and wakes it if not; the thread says that it
  // leaves its parking place, then looks whether somebody drives. So both never sleep in epoll at a time: each would
  // miss what the other takes.
  std::atomic<bool> is_driving_{false};
  std::atomic<bool> is_parked_{true};  // until it is started
  std::atomic<TimeNs> driven_at_{0};
  std::atomic<bool> has_driver_slept_{false};  // since it came: the thread need not look after it until it says so
  std::mutex park_mutex_;
  std::condition_variable unpark_;
  std::thread thread_;
};

}  // namespace kvferry
