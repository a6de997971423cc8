// What a transport has to tell its owner: completions and notifications, with the descriptor that says so.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <vector>

#include "transport/event_fd.h"
#include "transport/transport.h"

namespace kvferry {

/// Threads: any. The descriptor is readable exactly while something waits, also between two calls of different threads.
class CompletionQueue {
 public:
  void complete(Completion completion);
  /// False: kNotificationsMax unread ones wait already and this one was dropped.
  bool notify(Notification notification);
  std::vector<Completion> take_completions();
  std::vector<Notification> take_notifications();
  std::size_t num_completions() const;
  bool is_full_of_notifications() const;
  /// Cheap, without the lock: whether a take would give something.
  bool has_something() const { return has_something_.load(std::memory_order_acquire); }
  int event_fd() const { return event_.fd(); }

  static constexpr std::size_t kNotificationsMax = 65536;

 private:
  void signal_change(bool was_empty);

  mutable std::mutex mutex_;
  std::vector<Completion> completions_;
  std::vector<Notification> notifications_;
  std::atomic<bool> has_something_{false};
  EventFd event_;
};

}  // namespace kvferry
