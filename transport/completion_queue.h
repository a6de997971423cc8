// What a transport delivers to its caller: completions and notifications, and a descriptor that is readable while there
// are any.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <span>
#include <vector>

#include "transport/base/net/event_fd.h"
#include "transport/transport.h"

namespace kvferry {

/// The completions and notifications that a caller has not read yet. Threads: any. The descriptor is readable as long
/// as a completion or notification is unread.
class CompletionQueue {
 public:
  void complete(Completion completion);
  /// Adds a notification. Returns false, and drops the notification, if kNotificationsMax notifications are unread.
  bool notify(Notification notification);
  std::vector<Completion> take_completions();
  std::vector<Notification> take_notifications();
  std::size_t num_completions() const;
  bool is_full_of_notifications() const;
  /// Returns true if a completion or notification is unread. Does not lock the mutex.
  bool has_something() const { return has_something_.load(std::memory_order_acquire); }
  int event_fd() const { return event_.fd(); }
  /// Sleeps until a completion or notification is unread, one of `interrupt_fds` is readable or the time has passed.
  /// Returns has_something().
  bool wait(TimeNs timeout_ns, std::span<const int> interrupt_fds) const;

  static constexpr std::size_t kNotificationsMax = 65536;

 private:
  void signal_change();

  mutable std::mutex mutex_;
  std::vector<Completion> completions_;
  std::vector<Notification> notifications_;
  std::atomic<bool> has_something_{false};
  EventFd event_;
};

}  // namespace kvferry
