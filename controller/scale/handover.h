// What threads of ours hand to the owner thread: a bounded queue behind a file descriptor.
#pragma once

#include <sys/eventfd.h>

#include <condition_variable>
#include <csignal>
#include <iterator>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/base/owned_fd.h"

namespace kvferry::controller::scale {

/// First thing in a thread of ours: the process's signals are the main thread's, and a socket whose peer is gone must
/// not end the process.
inline void leave_signals_to_others() {
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

template <class T>
class Handover {
 public:
  explicit Handover(std::size_t items_max) : items_max_(items_max) {}

  /// Readable while items wait.
  int fd() const { return fd_.get(); }

  /// Waits for room; false: closed, and the item is dropped. Any thread but the owner.
  bool put(T item) {
    std::unique_lock lock(mutex_);
    room_.wait(lock, [&] { return is_closed_ || items_.size() < items_max_; });
    if (is_closed_) return false;
    items_.push_back(std::move(item));
    ::eventfd_write(fd_.get(), 1);
    return true;
  }

  /// At most `num_max` of them, in order. The owner.
  std::vector<T> take(std::size_t num_max) {
    const std::lock_guard lock(mutex_);
    std::vector<T> taken;
    if (items_.size() <= num_max) {
      taken.swap(items_);
      eventfd_t count = 0;
      ::eventfd_read(fd_.get(), &count);
    } else {
      const auto end = items_.begin() + static_cast<std::ptrdiff_t>(num_max);
      taken.assign(std::make_move_iterator(items_.begin()), std::make_move_iterator(end));
      items_.erase(items_.begin(), end);
    }
    room_.notify_all();
    return taken;
  }

  /// Nobody waits from here on.
  void close() {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    room_.notify_all();
  }

 private:
  std::size_t items_max_;
  OwnedFd fd_{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
  std::mutex mutex_;
  std::condition_variable room_;
  std::vector<T> items_;
  bool is_closed_ = false;
};

}  // namespace kvferry::controller::scale
