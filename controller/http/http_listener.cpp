#include "controller/http/http_listener.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "controller/http/http_api.h"
#include "controller/http/timed_server.h"
#include "transport/base/net/event_fd.h"

namespace kvferry::controller {
namespace {

constexpr TimeNs kOwnerMax = 2 * kSecond;  // limit on the time until the owner thread starts a call

/// Lets other threads run work on the owner thread and wait for it.
class OwnerCalls {
 public:
  /// Readable while calls wait.
  int fd() const { return wake_up_.fd(); }

  /// Threads: any but the owner thread. kUnavailable: `work` did not start within `timeout`, and never will.
  Result<void> call(const std::function<void(TimeNs)>& work, TimeNs timeout) {
    const auto call = std::make_shared<Call>();
    call->work = &work;
    std::unique_lock lock(mutex_);
    if (!is_closed_ && calls_.size() < kCallsMax) {
      calls_.push_back(call);
      wake_up_.set();
      done_.wait_for(lock, std::chrono::nanoseconds(timeout),
                     [&] { return call->state == State::kDone || is_closed_; });
      // A started call must finish: `work` refers to this thread's stack.
      if (call->state == State::kRunning) done_.wait(lock, [&] { return call->state == State::kDone; });
      if (call->state == State::kDone) return {};
      call->state = State::kGivenUp;
    }
    return Error{ErrorCode::kUnavailable, "the controller is busy and did not answer in time; try again"};
  }

  /// Threads: the owner thread. Returns true if more calls wait.
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

  /// Fails all waiting and later calls.
  void close() {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    done_.notify_all();
  }

 private:
  static constexpr std::size_t kCallsMax = 256;  // limit on waiting calls
  static constexpr std::size_t kCallsPerTakeMax = 32;
  enum class State { kWaiting, kRunning, kDone, kGivenUp };
  struct Call {
    const std::function<void(TimeNs)>* work = nullptr;
    State state = State::kWaiting;
  };
  EventFd wake_up_{std::nothrow};
  std::mutex mutex_;
  std::condition_variable done_;
  std::deque<std::shared_ptr<Call>> calls_;
  bool is_closed_ = false;
};

class HttpListener final : public BoundListener {
 public:
  explicit HttpListener(const HttpBackend& backend)
      : api_(backend, [this](const std::function<void(TimeNs)>& work) { return calls_.call(work, kOwnerMax); }) {
    const auto handler = [this](const httplib::Request& request, httplib::Response& response) {
      const HttpAnswer answer = api_.answer(request.method, request.path, request.body);
      response.status = answer.status;
      response.set_content(answer.body, answer.content_type);
    };
    server_.Get(".*", handler);
    server_.Post(".*", handler);
    server_.set_error_handler([](const httplib::Request& request, httplib::Response& response) {
      if (!response.body.empty()) return;
      const std::string why = response.status == 413   ? "the body is too long"
                              : response.status == 400 ? "no complete HTTP request within 10 s"
                                                       : request.method + " is not allowed; allowed: GET and POST";
      const HttpAnswer answer = http_error(response.status, why);
      response.set_content(answer.body, answer.content_type);
    });
  }
  ~HttpListener() override {
    calls_.close();
    server_.end();
    if (accept_thread_.joinable()) accept_thread_.join();
  }

  Result<void> listen(const net::HostPort& address) {
    int port = address.port;
    if (port == 0)
      port = server_.bind_to_any_port(address.host);
    else if (!server_.bind_to_port(address.host, port))
      port = -1;
    if (port < 0)
      return Error{ErrorCode::kUnavailable,
                   fmt::format("cannot listen on {}: port in use or address not local", net::to_text(address))};
    address_ = net::to_text({address.host, static_cast<std::uint16_t>(port)});
    accept_thread_ = std::thread([this] { server_.listen_after_bind(); });
    while (!server_.is_running())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // stop() has no effect before the server runs
    return {};
  }

  const std::string& address() const override { return address_; }
  int fd() const override { return calls_.fd(); }
  bool serve(TimeNs now) override { return calls_.take(now); }

 private:
  OwnerCalls calls_;
  HttpApi api_;
  TimedServer server_;
  std::string address_;
  std::thread accept_thread_;
};

}  // namespace

Result<std::unique_ptr<BoundListener>> listen_http(const net::HostPort& address, const HttpBackend& backend) {
  auto listener = std::make_unique<HttpListener>(backend);
  KVFERRY_TRY(listener->listen(address));
  return std::unique_ptr<BoundListener>(std::move(listener));
}

}  // namespace kvferry::controller
