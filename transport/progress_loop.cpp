#include "transport/progress_loop.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <future>
#include <utility>

#include "transport/base/check.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kWakeTag = 0;
// A caller that comes back to drive() within this time finds the progress thread still parked: handing the loop back
// and forth costs two context switches, more than a whole round trip.
constexpr TimeNs kHandBackNs = 300'000;

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
      guests_fd_(::epoll_create1(EPOLL_CLOEXEC)) {
  KVFERRY_CHECK(epoll_fd_ >= 0 && guests_fd_ >= 0, "no file descriptor left for epoll: {}", std::strerror(errno));
  watch(wake_.fd(), EPOLLIN, kWakeTag);
}

ProgressLoop::~ProgressLoop() {
  stop();
  ::close(guests_fd_);
  ::close(epoll_fd_);
}

void ProgressLoop::start() {
  is_parked_ = false;
  thread_ = std::thread(&ProgressLoop::thread_main, this);
}

void ProgressLoop::stop() {
  is_stopping_ = true;
  wake_.set();
  {
    const std::lock_guard parked(park_mutex_);
    unpark_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  const std::lock_guard no_driver(driver_mutex_);  // a driver has left the loop
  run_leftovers();
}

void ProgressLoop::watch(int fd, std::uint32_t epoll_events, std::uint64_t tag) {
  epoll_event event{epoll_events, {.u64 = tag}};
  const int code = ::epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event);
  KVFERRY_CHECK(code == 0, "cannot watch descriptor {}: {}", fd, std::strerror(errno));
}

void ProgressLoop::rewatch(int fd, std::uint32_t epoll_events, std::uint64_t tag) {
  epoll_event event{epoll_events, {.u64 = tag}};
  const int code = ::epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, fd, &event);
  KVFERRY_CHECK(code == 0, "cannot watch descriptor {}: {}", fd, std::strerror(errno));
}

void ProgressLoop::add_wakeup_fd(int fd) {
  if (!has_guests_.exchange(true)) {
    epoll_event own{EPOLLIN, {.fd = epoll_fd_}};
    ::epoll_ctl(guests_fd_, EPOLL_CTL_ADD, epoll_fd_, &own);
  }
  epoll_event event{EPOLLIN, {.fd = fd}};
  const int code = ::epoll_ctl(guests_fd_, EPOLL_CTL_ADD, fd, &event);
  KVFERRY_CHECK(code == 0, "cannot watch descriptor {}: {}", fd, std::strerror(errno));
}

bool ProgressLoop::sleep_with_guests(int timeout_ms) const {
  std::array<epoll_event, 8> events;
  const int num_events = ::epoll_wait(guests_fd_, events.data(), static_cast<int>(events.size()), timeout_ms);
  return std::any_of(events.begin(), events.begin() + std::max(num_events, 0),
                     [this](const epoll_event& event) { return event.data.fd != epoll_fd_; });
}

void ProgressLoop::unwatch(int fd) { ::epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr); }

void ProgressLoop::call(std::function<void()> task) {
  if (std::unique_lock lock(mutex_, std::try_to_lock); lock.owns_lock()) {
    run_inbox();
    task();
    if (is_driving_) wake_.set();  // the driver may sleep, and what it waits for may be here now
  } else {
    {
      const std::lock_guard posting(inbox_mutex_);
      inbox_.push_back(std::move(task));
      has_inbox_ = true;
    }
    wake_.set();
  }
  run_leftovers();
}

void ProgressLoop::run_leftovers() {
  while (is_stopping_ && has_inbox_) {
    const std::lock_guard lock(mutex_);
    run_inbox();
  }
}

void ProgressLoop::call_and_wait(const std::function<void()>& task) {
  std::promise<void> done;
  std::future<void> waiting = done.get_future();
  call([&] {
    task();
    done.set_value();
  });
  waiting.get();
}

void ProgressLoop::run_inbox() {
  if (!has_inbox_) return;
  std::vector<std::function<void()>> tasks;
  {
    const std::lock_guard lock(inbox_mutex_);
    has_inbox_ = false;
    tasks = std::exchange(inbox_, {});
  }
  for (const std::function<void()>& task : tasks) task();
}

bool ProgressLoop::look(int timeout_ms, bool is_driver) {
  std::array<epoll_event, 64> events;
  const int num_events = ::epoll_wait(epoll_fd_, events.data(), static_cast<int>(events.size()), timeout_ms);
  if (num_events <= 0) return false;
  const std::lock_guard lock(mutex_);
  for (int index = 0; index < num_events; ++index) {
    const epoll_event& event = events[static_cast<std::size_t>(index)];
    if (event.data.u64 == kWakeTag) {
      if (is_driver && !is_parked_) continue;  // it is for the thread, which is on its way
      wake_.clear();
      if (is_stopping_) wake_.set();  // for all who sleep
    } else {
      owner_.on_ready(event.data.u64, event.events);
    }
  }
  return true;
}

bool ProgressLoop::is_driven() const {
  return is_driving_.load(std::memory_order_acquire) ||
         clock_.now() - driven_at_.load(std::memory_order_relaxed) < kHandBackNs;
}

void ProgressLoop::park() {
  std::unique_lock parked(park_mutex_);
  if (is_stopping_) return;
  is_parked_ = true;
  if (has_driver_slept_) {
    unpark_.wait(parked);  // the driver will say when it leaves
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
      run_inbox();
      has_more = owner_.advance(clock_.now());
      deadline = owner_.next_deadline();
    }
    if (is_driven()) continue;
    const bool has_seen = look(has_more || has_inbox_ ? 0 : milliseconds_until(deadline, clock_.now()), false);
    // Who drives since may sleep: what we have just taken from its sight is for it to go on with.
    if (has_seen && is_driving_) wake_.set();
  }
}

std::optional<bool> ProgressLoop::drive(TimeNs timeout_ns, const std::function<bool()>& is_over) {
  const std::unique_lock driving(driver_mutex_, std::try_to_lock);
  if (!driving.owns_lock()) return std::nullopt;
  const auto end_with_what_was_posted = [&] {  // before stop(), whoever has taken it
    const std::lock_guard lock(mutex_);
    run_inbox();
    return is_over();
  };
  if (is_stopping_) return end_with_what_was_posted();
  const TimeNs started_at = clock_.now();
  const TimeNs ends_at = timeout_ns < kNever - started_at ? started_at + timeout_ns : kNever;
  is_driving_ = true;
  if (!is_parked_) wake_.set();
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
      run_inbox();
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
        if (look(0, true)) busy_at = clock_.now();
      }
    } else if (is_spinning) {
      set_spinning(is_spinning = false);  // and round once more: who came before that woke nobody
    } else {
      has_driver_slept_ = true;
      const int sleep_ms = milliseconds_until(std::min(deadline, ends_at), now);
      if (has_guests_ && sleep_with_guests(sleep_ms)) break;
      if (look(has_guests_ ? 0 : sleep_ms, true)) busy_at = clock_.now();
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
  return over || (is_stopping_ ? end_with_what_was_posted() : is_over());
}

}  // namespace kvferry
