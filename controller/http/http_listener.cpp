#include "controller/http/http_listener.h"

#include <arpa/inet.h>
#include <httplib.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <charconv>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "controller/protocol/wake_up.h"

namespace kvferry::controller {
namespace {

constexpr std::size_t kCallsMax = 256;  // that wait for the owner
constexpr std::size_t kCallsPerTakeMax = 32;

/// Work that other threads want done by the owner.
class OwnerCalls {
 public:
  int fd() const { return wake_up_.fd(); }

  /// Threads: any but the owner's. False: not done, and it won't be.
  bool call(const std::function<void(TimeNs)>& work, TimeNs deadline_in) {
    const auto call = std::make_shared<Call>();
    call->work = &work;
    std::unique_lock lock(mutex_);
    if (is_closed_ || calls_.size() >= kCallsMax) return false;
    calls_.push_back(call);
    wake_up_.raise();
    const auto patience = std::chrono::nanoseconds(deadline_in);
    done_.wait_for(lock, patience, [&] { return call->state == State::kDone || is_closed_; });
    // What the owner is at now is waited for: it refers to the caller's stack.
    if (call->state == State::kRunning) done_.wait(lock, [&] { return call->state == State::kDone; });
    if (call->state == State::kWaiting) call->state = State::kGivenUp;
    return call->state == State::kDone;
  }

  /// Threads: the owner's. True: more waits.
  bool take(TimeNs now) {
    wake_up_.clear();
    for (std::size_t i = 0; i < kCallsPerTakeMax; ++i) {
      std::shared_ptr<Call> call;
      {
        const std::lock_guard lock(mutex_);
        if (calls_.empty()) return false;
        call = std::move(calls_.front());
        calls_.pop_front();
        if (call->state == State::kGivenUp) continue;
        call->state = State::kRunning;
      }
      (*call->work)(now);
      const std::lock_guard lock(mutex_);
      call->state = State::kDone;
      done_.notify_all();
    }
    return true;
  }

  void close() {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    done_.notify_all();
  }

 private:
  enum class State { kWaiting, kRunning, kDone, kGivenUp };
  struct Call {
    const std::function<void(TimeNs)>* work = nullptr;
    State state = State::kWaiting;
  };
  WakeUp wake_up_;
  std::mutex mutex_;
  std::condition_variable done_;
  std::deque<std::shared_ptr<Call>> calls_;
  bool is_closed_ = false;
};

/// A connection whose reads and writes end at a deadline, whatever trickles in before it.
class TimedStream final : public httplib::Stream {
 public:
  TimedStream(int fd, const Clock& clock) : fd_(fd), clock_(clock) {}
  void read_until(TimeNs deadline) { read_deadline_ = deadline; }
  void write_until(TimeNs deadline) { write_deadline_ = deadline; }

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
    write_deadline_ = 0;  // from the first byte on
  }
  bool has_buffered() const { return begin_ != end_; }
  void get_remote_ip_and_port(std::string& ip, int& port) const override { unknown(ip, port); }
  void get_local_ip_and_port(std::string& ip, int& port) const override { unknown(ip, port); }
  socket_t socket() const override { return fd_; }

 private:
  static void unknown(std::string& ip, int& port) {
    ip.clear();
    port = 0;
  }
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

/// Connections that wait are bounded; when none of them may wait any more, the next is turned away by the accepting
/// thread itself.
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

/// httplib's server, but a client has a time for its whole request where httplib gives it one for each read.
class TimedServer final : public httplib::Server {
 public:
  explicit TimedServer(const HttpOptions& options) : options_(options) {
    set_payload_max_length(options.body_bytes_max);
    set_tcp_nodelay(true);
    set_keep_alive_max_count(1U << 30);
    new_task_queue = [this] { return new BoundedThreads(options_.num_threads, options_.waiting_max, num_waiting_); };
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
      stream.read_until(clock_.now() + options_.request_max);
      stream.write_within(options_.answer_max);
      bool is_closed = false;
      if (!process_request(stream, false, is_closed, nullptr)) return;
      is_closing = is_closed;
    }
  }
  /// A connection that is idle gives way to one that waits.
  bool wait_for_request(int fd, const TimedStream& stream) const {
    constexpr int kStepMs = 20;
    const TimeNs deadline = clock_.now() + options_.idle_max;
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

  HttpOptions options_;
  SteadyClock clock_;
  std::atomic<std::size_t> num_waiting_{0};
  std::atomic<bool> is_ending_{false};
};

class HttplibListener final : public HttpListener {
 public:
  HttplibListener(const HttpOptions& options, HttpBackend backend)
      : api_(std::move(backend), [this, patience = options.owner_max](
                                     const std::function<void(TimeNs)>& work) { return calls_.call(work, patience); }),
        server_(options) {
    const auto handler = [this](const httplib::Request& request, httplib::Response& response) {
      const HttpAnswer answer = api_.answer(request.method, request.path, request.body);
      response.status = answer.status;
      response.set_content(answer.body, answer.content_type);
    };
    server_.Get(".*", handler);
    server_.Post(".*", handler);
    server_.set_error_handler([](const httplib::Request& request, httplib::Response& response) {
      if (!response.body.empty()) return;
      const HttpAnswer answer =
          http_error(response.status, response.status == 413 ? std::string("the body is too long")
                                      : response.status == 400
                                          ? std::string("not a whole HTTP request within 10 s")
                                          : fmt::format("{} is not allowed; allowed: GET and POST", request.method));
      response.set_content(answer.body, answer.content_type);
    });
  }
  ~HttplibListener() override {
    calls_.close();
    server_.end();
    if (listener_.joinable()) listener_.join();
  }

  Result<void> listen(const HttpOptions& options) {
    int port = options.port;
    if (port == 0)
      port = server_.bind_to_any_port(options.host);
    else if (!server_.bind_to_port(options.host, port))
      port = -1;
    if (port < 0)
      return Error{ErrorCode::kUnavailable,
                   fmt::format("can't listen on {}:{} for HTTP; is the port in use, or HOST none of this machine?",
                               options.host, options.port)};
    address_ = fmt::format("{}:{}", options.host, port);
    listener_ = std::thread([this] { server_.listen_after_bind(); });
    while (!server_.is_running()) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // or stop() does nothing
    return {};
  }

  const std::string& address() const override { return address_; }
  int fd() const override { return calls_.fd(); }
  bool take(TimeNs now) override { return calls_.take(now); }

 private:
  OwnerCalls calls_;
  HttpApi api_;
  TimedServer server_;
  std::string address_;
  std::thread listener_;
};

}  // namespace

Result<std::unique_ptr<HttpListener>> HttpListener::bind(const HttpOptions& options, HttpBackend backend) {
  auto front = std::make_unique<HttplibListener>(options, std::move(backend));
  if (Result<void> listening = front->listen(options); !listening) return std::move(listening).error();
  return std::unique_ptr<HttpListener>(std::move(front));
}

Result<HttpOptions> parse_http_address(const std::string& address) {
  HttpOptions options;
  const std::size_t colon = address.rfind(':');
  const char* end = address.data() + address.size();
  bool is_right = colon != std::string::npos && colon > 0;
  if (is_right) {
    const auto [parsed, failure] = std::from_chars(address.data() + colon + 1, end, options.port);
    is_right = failure == std::errc{} && parsed == end && options.port >= 0 && options.port <= 65535;
    options.host = address.substr(0, colon);
    if (options.host.front() == '[' && options.host.back() == ']')
      options.host = options.host.substr(1, options.host.size() - 2);
    is_right = is_right && !options.host.empty() && options.host.find_first_of(" /") == std::string::npos;
  }
  if (!is_right)
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("'{}' is not an address; allowed: HOST:PORT with a port of 0 to 65535", address)};
  return options;
}

}  // namespace kvferry::controller
