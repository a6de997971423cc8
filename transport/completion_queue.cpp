#include "transport/completion_queue.h"

#include <poll.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace kvferry {

void CompletionQueue::signal_change() {
  const bool has_something = !completions_.empty() || !notifications_.empty();
  if (has_something_.load(std::memory_order_relaxed) == has_something) return;
  has_something_.store(has_something, std::memory_order_release);
  has_something ? event_.set() : event_.clear();
}

void CompletionQueue::complete(Completion completion) {
  const std::lock_guard lock(mutex_);
  completions_.push_back(std::move(completion));
  signal_change();
}

bool CompletionQueue::notify(Notification notification) {
  const std::lock_guard lock(mutex_);
  if (notifications_.size() >= kNotificationsMax) return false;
  notifications_.push_back(std::move(notification));
  signal_change();
  return true;
}

std::vector<Completion> CompletionQueue::take_completions() {
  const std::lock_guard lock(mutex_);
  std::vector<Completion> taken = std::exchange(completions_, {});
  signal_change();
  return taken;
}

std::vector<Notification> CompletionQueue::take_notifications() {
  const std::lock_guard lock(mutex_);
  std::vector<Notification> taken = std::exchange(notifications_, {});
  signal_change();
  return taken;
}

bool CompletionQueue::is_full_of_notifications() const {
  const std::lock_guard lock(mutex_);
  return notifications_.size() >= kNotificationsMax;
}

std::size_t CompletionQueue::num_completions() const {
  const std::lock_guard lock(mutex_);
  return completions_.size();
}

bool CompletionQueue::wait(TimeNs timeout_ns, std::span<const int> interrupt_fds) const {
  constexpr TimeNs kPollMax = std::numeric_limits<int>::max();
  const TimeNs timeout_ms = std::clamp<TimeNs>((timeout_ns + kMillisecond - 1) / kMillisecond, 0, kPollMax);
  std::vector<pollfd> waiting = {{event_fd(), POLLIN, 0}};
  for (const int fd : interrupt_fds) waiting.push_back({fd, POLLIN, 0});
  ::poll(waiting.data(), waiting.size(), static_cast<int>(timeout_ms));
  return has_something();
}

}  // namespace kvferry
