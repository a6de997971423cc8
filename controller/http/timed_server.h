// httplib's server with deadlines and a bounded queue, so that slow clients can't occupy all threads.
#pragma once

#include <httplib.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transport/base/clock.h"
#include "transport/base/net/tcp_socket.h"

namespace kvferry::controller {

constexpr std::size_t kHttpThreads = 16;     // concurrent requests
constexpr std::size_t kHttpWaitingMax = 64;  // connections waiting for a thread; further ones get a 503
constexpr std::size_t kHttpBodyBytesMax = std::size_t{16} << 20;
constexpr TimeNs kHttpRequestMax = 10 * kSecond;  // limit on the time from the first byte of a request to its last
constexpr TimeNs kHttpAnswerMax = 10 * kSecond;   // limit on the time in which the client reads the answer
constexpr TimeNs kHttpIdleMax = 5 * kSecond;      // limit on the time between two requests on a connection

/// A connection with deadlines for all reads and all writes of a request, however slowly bytes arrive.
class TimedStream final : public httplib::Stream {
 public:
  TimedStream(int fd, const Clock& clock) : fd_(fd), clock_(clock) {}
  void read_until(TimeNs deadline) { read_deadline_ = deadline; }

  bool is_readable() const override { return wait(POLLIN, read_deadline_); }
  bool is_writable() const override { return wait(POLLOUT, write_deadline_); }
  ssize_t read(char* to, std::size_t size) override {
    if (begin_ == end_) {
      if (!is_readable()) return -1;
      const ssize_t got = ::recv(fd_, buffer_, sizeof buffer_, 0);
      if (got <= 0) return got;
      begin_ = 0;
      end_ = static_cast<std::size_t>(got);
    }
    const std::size_t count = std::min(size, end_ - begin_);
    std::copy_n(buffer_ + begin_, count, to);
    begin_ += count;
    return static_cast<ssize_t>(count);
  }
  ssize_t write(const char* from, std::size_t size) override {
    if (write_deadline_ == 0) write_deadline_ = clock_.now() + write_time_;
    return is_writable() ? ::send(fd_, from, size, MSG_NOSIGNAL | MSG_DONTWAIT) : -1;
  }
  void write_within(TimeNs time) {
    write_time_ = time;
    write_deadline_ = 0;  // set by the first write
  }
  bool has_buffered() const { return begin_ != end_; }
  void get_remote_ip_and_port(std::string&, int&) const override {}
  void get_local_ip_and_port(std::string&, int&) const override {}
  socket_t socket() const override { return fd_; }

 private:
  bool wait(short events, TimeNs deadline) const {
    pollfd item{fd_, events, 0};
    for (;;) {
      const TimeNs left = deadline - clock_.now();
      if (left <= 0) return false;
      const int ready = ::poll(&item, 1, static_cast<int>(left / kMillisecond) + 1);
      if (ready > 0) return true;
      if (ready < 0 && errno != EINTR) return false;
    }
  }
  int fd_;
  const Clock& clock_;
  TimeNs read_deadline_ = 0, write_deadline_ = 0, write_time_ = 0;
  char buffer_[16384];
  std::size_t begin_ = 0, end_ = 0;
};

/// A thread pool with a bounded queue of connections. If the queue is full, the accepting thread refuses the
/// connection.
class BoundedThreads final : public httplib::TaskQueue {
 public:
  BoundedThreads(std::size_t num_threads, std::size_t waiting_max, std::atomic<std::size_t>& num_waiting)
      : waiting_max_(waiting_max), num_waiting_(num_waiting) {
    for (std::size_t i = 0; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
  }
  static bool& is_refusing() {
    thread_local bool refusing = false;
    return refusing;
  }
  void enqueue(std::function<void()> task) override {
    std::unique_lock lock(mutex_);
    if (tasks_.size() >= waiting_max_) {
      lock.unlock();
      is_refusing() = true;
      task();
      is_refusing() = false;
      return;
    }
    tasks_.push_back(std::move(task));
    num_waiting_ = tasks_.size();
    wanted_.notify_one();
  }
  void shutdown() override {
    {
      const std::lock_guard lock(mutex_);
      is_over_ = true;
      wanted_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock lock(mutex_);
      wanted_.wait(lock, [&] { return is_over_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      num_waiting_ = tasks_.size();
      lock.unlock();
      task();
    }
  }
  std::size_t waiting_max_;
  std::atomic<std::size_t>& num_waiting_;
  std::mutex mutex_;
  std::condition_variable wanted_;
  std::deque<std::function<void()>> tasks_;
  bool is_over_ = false;
  std::vector<std::thread> threads_;
};

/// httplib's server with one deadline for a whole request; httplib has one for each read.
class TimedServer final : public httplib::Server {
 public:
  TimedServer() {
    set_payload_max_length(kHttpBodyBytesMax);
    set_socket_options([](socket_t listener) {
      httplib::default_socket_options(listener);
      net::set_tcp_options(listener);  // accepted connections inherit them
    });
    set_keep_alive_max_count(1U << 30);
    new_task_queue = [this] { return new BoundedThreads(kHttpThreads, kHttpWaitingMax, num_waiting_); };
  }
  void end() {
    is_ending_ = true;
    stop();
  }

 private:
  bool process_and_close_socket(socket_t fd) override {
    if (BoundedThreads::is_refusing()) {
      constexpr std::string_view kBusy =
          "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
      ::send(fd, kBusy.data(), kBusy.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    } else {
      serve(fd);
    }
    ::shutdown(fd, SHUT_RDWR);
    ::close(fd);
    return true;
  }
  void serve(int fd) {
    TimedStream stream(fd, clock_);
    for (bool is_closing = false; !is_closing && wait_for_request(fd, stream);) {
      stream.read_until(clock_.now() + kHttpRequestMax);
      stream.write_within(kHttpAnswerMax);
      bool is_closed = false;
      if (!process_request(stream, false, is_closed, nullptr)) return;
      is_closing = is_closed;
    }
  }
  /// Waits for a request. Returns false if the connection should close: idle for too long, or others wait for a thread.
  bool wait_for_request(int fd, const TimedStream& stream) const {
    constexpr int kStepMs = 20;
    const TimeNs deadline = clock_.now() + kHttpIdleMax;
    for (bool is_first = true; !is_ending_; is_first = false) {
      if (stream.has_buffered()) return true;
      pollfd item{fd, POLLIN, 0};
      const int ready = ::poll(&item, 1, kStepMs);
      if (ready > 0) return true;
      if (ready < 0 && errno != EINTR) return false;
      if (clock_.now() > deadline || (!is_first && num_waiting_ > 0)) return false;
    }
    return false;
  }

  SteadyClock clock_;
  std::atomic<std::size_t> num_waiting_{0};
  std::atomic<bool> is_ending_{false};
};

}  // namespace kvferry::controller
