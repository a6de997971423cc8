#include "transport/progress_loop.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "transport/base/check.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kWakeTag = 0;
// Least time for which the progress thread stays parked after drive() has returned, because the caller may soon call
// drive() again: giving the loop to the thread and back costs two context switches, more than a message's round trip.
constexpr TimeNs kHandBackNs = 300'000;

bool add_to(int epoll_fd, int fd, epoll_event event) { return ::epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0; }

void must_add_to(int epoll_fd, int fd, epoll_event event) {
  KVFERRY_CHECK(add_to(epoll_fd, fd, event), "cannot watch file descriptor {} with epoll: {}", fd,
                std::strerror(errno));
}

int milliseconds_until(TimeNs deadline, TimeNs now) {
  if (deadline == ProgressLoop::kNever) return -1;
  return static_cast<int>(std::clamp<TimeNs>((deadline - now + kMillisecond - 1) / kMillisecond, 0, 60'000));
}

}  // namespace

ProgressLoop::ProgressLoop(Owner& owner, const char* thread_name, TimeNs spin_ns, TimeNs look_ns)
    : owner_(owner),
      thread_name_(thread_name),
      spin_ns_(spin_ns),
      look_ns_(look_ns),
      epoll_fd_(::epoll_create1(EPOLL_CLOEXEC)),
      wakeup_fd_(::epoll_create1(EPOLL_CLOEXEC)) {
  KVFERRY_CHECK(epoll_fd_ >= 0 && wakeup_fd_ >= 0,
                "cannot create an epoll descriptor: {}; if descriptors are used up, raise the limit (ulimit -n)",
                std::strerror(errno));
  must_add_to(epoll_fd_, inbox_.wake().fd(), {EPOLLIN, {.u64 = kWakeTag}});
}

ProgressLoop::~ProgressLoop() {
  stop();
  ::close(wakeup_fd_);
  ::close(epoll_fd_);
}

void ProgressLoop::start() {
  is_parked_ = false;
  thread_ = std::thread(&ProgressLoop::thread_main, this);
}

void ProgressLoop::stop() {
  is_stopping_ = true;
  inbox_.wake().set();
  {
    const std::lock_guard parked(park_mutex_);
    unpark_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  const std::lock_guard no_driver(driver_mutex_);  // waits until a driver has left the loop
  run_leftovers();
}

bool ProgressLoop::watch(int fd, std::uint32_t epoll_events, std::uint64_t tag) {
  return add_to(epoll_fd_, fd, {epoll_events, {.u64 = tag}});
}

void ProgressLoop::add_wakeup_fd(int fd) {
  if (!has_wakeup_fds_.exchange(true)) must_add_to(wakeup_fd_, epoll_fd_, {EPOLLIN, {.fd = epoll_fd_}});
  must_add_to(wakeup_fd_, fd, {EPOLLIN, {.fd = fd}});
}

bool ProgressLoop::wait_for_wakeup_fds(int timeout_ms) const {
  std::array<epoll_event, 8> events;
  const int num_events = ::epoll_wait(wakeup_fd_, events.data(), static_cast<int>(events.size()), timeout_ms);
  return std::any_of(events.begin(), events.begin() + std::max(num_events, 0),
                     [this](const epoll_event& event) { return event.data.fd != epoll_fd_; });
}

void ProgressLoop::unwatch(int fd) { ::epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr); }

void ProgressLoop::call(TaskInbox::Task task) {
  if (std::unique_lock lock(mutex_, std::try_to_lock); lock.owns_lock()) {
    inbox_.run();
    task();
    // The thread in drive() may be asleep, waiting for what the task has just completed.
    if (is_driving_ || owner_.needs_advance()) kick();
  } else {
    inbox_.post(std::move(task));
  }
  run_leftovers();
}

void ProgressLoop::run_leftovers() {
  while (is_stopping_ && inbox_.has_tasks()) {
    const std::lock_guard lock(mutex_);
    inbox_.run();
  }
}

bool ProgressLoop::look(int timeout_ms, bool is_driver) {
  std::array<epoll_event, 64> events;
  const int num_events = ::epoll_wait(epoll_fd_, events.data(), static_cast<int>(events.size()), timeout_ms);
  if (num_events <= 0) return false;
  const std::lock_guard lock(mutex_);
  for (int index = 0; index < num_events; ++index) {
    const epoll_event& event = events[static_cast<std::size_t>(index)];
    if (event.data.u64 == kWakeTag) {
      if (is_driver && !is_parked_) continue;  // the wake-up is for the progress thread, which is about to park
      inbox_.wake().clear();
      if (is_stopping_) inbox_.wake().set();  // the thread and the driver must both see the wake-up
    } else {
      owner_.on_ready(event.data.u64, event.events);
    }
  }
  return true;
}

bool ProgressLoop::is_driven() const {
  return is_driving_.load(std::memory_order_seq_cst) ||
         clock_.now() - driven_at_.load(std::memory_order_relaxed) < kHandBackNs;
}

void ProgressLoop::park() {
  std::unique_lock parked(park_mutex_);
  if (is_stopping_) return;
  is_parked_ = true;
  if (has_driver_slept_) {
    unpark_.wait(parked);  // the driver notifies unpark_ when it leaves the loop
  } else {
    unpark_.wait_for(parked, std::chrono::nanoseconds(kHandBackNs));
  }
  is_parked_ = false;
}

void ProgressLoop::thread_main() {
  ::pthread_setname_np(::pthread_self(), thread_name_);
  while (!is_stopping_) {
    if (is_driven()) {
      park();
      continue;
    }
    bool has_more;
    TimeNs deadline;
    {
      const std::lock_guard lock(mutex_);
      inbox_.run();
      has_more = owner_.advance(clock_.now());
      deadline = owner_.next_deadline();
    }
    if (is_driven()) continue;
    const bool has_seen = look(has_more || inbox_.has_tasks() ? 0 : milliseconds_until(deadline, clock_.now()), false);
    // A driver that started meanwhile may sleep: the driver must be woken to do the work that follows from the events
    // that this thread has handled.
    if (has_seen && is_driving_) inbox_.wake().set();
  }
}

std::optional<bool> ProgressLoop::drive(TimeNs timeout_ns, const std::function<bool()>& is_over) {
  const std::unique_lock driving(driver_mutex_, std::try_to_lock);
  if (!driving.owns_lock()) return std::nullopt;
  const auto end_with_posted_tasks = [&] {  // runs the tasks that were posted before stop()
    const std::lock_guard lock(mutex_);
    inbox_.run();
    return is_over();
  };
  if (is_stopping_) return end_with_posted_tasks();
  const TimeNs started_at = clock_.now();
  const TimeNs ends_at = timeout_ns < kNever - started_at ? started_at + timeout_ns : kNever;
  is_driving_ = true;
  if (!is_parked_) inbox_.wake().set();
  const auto set_spinning = [this](bool is_spinning) {
    const std::lock_guard lock(mutex_);
    owner_.set_spinning(is_spinning);
  };
  set_spinning(true);
  bool is_spinning = true;
  TimeNs busy_at = started_at;
  TimeNs looked_at = 0;
  bool over = false;
  while (true) {
    bool has_more;
    TimeNs deadline;
    {
      const std::lock_guard lock(mutex_);
      inbox_.run();
      has_more = owner_.advance(clock_.now());
      deadline = owner_.next_deadline();
    }
    over = is_over();
    const TimeNs now = clock_.now();
    if (over || now >= ends_at || is_stopping_) break;
    if (has_more) busy_at = now;
    if (has_more || now - busy_at < spin_ns_) {
      if (!is_spinning) set_spinning(is_spinning = true);
      if (now - looked_at >= look_ns_) {
        looked_at = now;
        if (has_wakeup_fds_ && wait_for_wakeup_fds(0)) break;
        if (look(0, true)) busy_at = clock_.now();
      }
    } else if (is_spinning) {
      // One more round follows: a peer that sent something while the driver was polling has woken no thread.
      set_spinning(is_spinning = false);
    } else {
      has_driver_slept_ = true;
      const int sleep_ms = milliseconds_until(std::min(deadline, ends_at), now);
      if (has_wakeup_fds_ && wait_for_wakeup_fds(sleep_ms)) break;
      if (look(has_wakeup_fds_ ? 0 : sleep_ms, true)) busy_at = clock_.now();
    }
  }
  if (is_spinning) {
    set_spinning(false);
    const std::lock_guard lock(mutex_);
    owner_.advance(clock_.now());
  }
  driven_at_ = clock_.now();
  is_driving_ = false;
  if (has_driver_slept_) {
    const std::lock_guard parked(park_mutex_);
    has_driver_slept_ = false;
    unpark_.notify_one();
  }
  return over || (is_stopping_ ? end_with_posted_tasks() : is_over());
}

}  // namespace kvferry
