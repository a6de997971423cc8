// A bounded queue from other threads to the owner thread, with a file descriptor to wait on.
#pragma once

#include <condition_variable>
#include <csignal>
#include <iterator>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/base/net/event_fd.h"

namespace kvferry::controller::scale {

/// Each thread that the code of this folder starts must call this function first, so that no signal handler runs on the
/// thread and SIGPIPE does not end the process.
inline void block_all_signals() {
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

template <class T>
class OwnerQueue {
 public:
  explicit OwnerQueue(std::size_t items_max) : items_max_(items_max) {}

  /// Returns a file descriptor that is readable while items wait.
  int fd() const { return wake_up_.fd(); }

  /// Appends an item, after waiting for room. Returns false and drops the item if the queue is closed. Threads: any but
  /// the owner.
  bool put(T item) {
    std::unique_lock lock(mutex_);
    room_.wait(lock, [&] { return is_closed_ || items_.size() < items_max_; });
    if (is_closed_) return false;
    items_.push_back(std::move(item));
    wake_up_.set();
    return true;
  }

  /// Makes fd() readable until the next take() that leaves no item. Threads: any.
  void wake() { wake_up_.set(); }

  /// Takes up to `num_max` items, in order. Threads: the owner.
  std::vector<T> take(std::size_t num_max) {
    const std::lock_guard lock(mutex_);
    std::vector<T> taken;
    if (items_.size() <= num_max) {
      taken.swap(items_);
      wake_up_.clear();
    } else {
      const auto end = items_.begin() + static_cast<std::ptrdiff_t>(num_max);
      taken.assign(std::make_move_iterator(items_.begin()), std::make_move_iterator(end));
      items_.erase(items_.begin(), end);
    }
    room_.notify_all();
    return taken;
  }

  /// Makes all waiting and later put() calls return false.
  void close() {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    room_.notify_all();
  }

 private:
  std::size_t items_max_;
  EventFd wake_up_{std::nothrow};
  std::mutex mutex_;
  std::condition_variable room_;
  std::vector<T> items_;
  bool is_closed_ = false;
};

}  // namespace kvferry::controller::scale
