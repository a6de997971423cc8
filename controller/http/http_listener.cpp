#include "controller/http/http_listener.h"

#include <httplib.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "controller/http/http_access.h"
#include "controller/http/http_api.h"
#include "controller/http/http_connections.h"
#include "transport/base/net/event_fd.h"

namespace kvferry::controller {
namespace {

constexpr TimeNs kOwnerMax = 2 * kSecond;  // limit on the time until the owner thread starts a call

/// Lets other threads run work on the owner thread and wait for it.
class OwnerCalls {
 public:
  /// Returns a file descriptor that becomes readable when a call arrives, and stays so until the next take().
  int fd() const { return wake_up_.fd(); }

  /// Runs `work` on the owner thread and waits until it is done. Threads: any but the owner thread. kUnavailable:
  /// `work` did not start and will not start any more, because `timeout` has passed, kCallsMax calls wait, or close()
  /// was called.
  Result<void> call(const std::function<void(TimeNs)>& work, TimeNs timeout) {
    const auto call = std::make_shared<Call>();
    call->work = &work;
    std::unique_lock lock(mutex_);
    if (!is_closed_ && calls_.size() < kCallsMax) {
      calls_.push_back(call);
      wake_up_.set();
      done_.wait_for(lock, std::chrono::nanoseconds(timeout),
                     [&] { return call->state == State::kDone || is_closed_; });
      // This thread must wait until a started call has finished, because `work` refers to this thread's stack.
      if (call->state == State::kRunning) done_.wait(lock, [&] { return call->state == State::kDone; });
      if (call->state == State::kDone) return {};
      call->state = State::kGivenUp;
      if (!is_closed_)
        return Error{
            ErrorCode::kUnavailable,
            fmt::format("the controller is busy and did not answer within {} ms; try again", timeout / kMillisecond)};
    }
    if (is_closed_)
      return Error{ErrorCode::kUnavailable,
                   "the controller is shutting down; try again once it runs, or ask another replica"};
    return Error{
        ErrorCode::kUnavailable,
        fmt::format("the controller is busy: {} requests wait for it, which is the limit; try again", kCallsMax)};
  }

  /// Runs up to kCallsPerTakeMax of the waiting calls. Threads: the owner thread. Returns true if more calls may wait.
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
  static constexpr std::size_t kCallsMax = 256;  // limit on waiting calls; further calls fail at once
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

/// A stream for httplib that reads a request from memory and collects the answer.
class WholeRequest final : public httplib::Stream {
 public:
  explicit WholeRequest(std::string_view request) : left_(request) {}
  std::string take_answer() { return std::move(answer_); }

  bool is_readable() const override { return !left_.empty(); }
  bool is_writable() const override { return true; }
  ssize_t read(char* to, std::size_t size) override {
    const std::size_t count = left_.copy(to, size);
    left_.remove_prefix(count);
    return static_cast<ssize_t>(count);
  }
  ssize_t write(const char* from, std::size_t size) override {
    answer_.append(from, size);
    return static_cast<ssize_t>(size);
  }
  void get_remote_ip_and_port(std::string&, int&) const override {}
  void get_local_ip_and_port(std::string&, int&) const override {}
  socket_t socket() const override { return 0; }  // not used, but httplib refuses descriptors over 1023

 private:
  std::string_view left_;
  std::string answer_;
};

/// httplib's parser and router, without its sockets and threads.
class HttpParser final : public httplib::Server {
 public:
  std::string answer(std::string_view request, bool& is_last) {
    WholeRequest stream(request);
    bool is_closed = false;
    is_last |= !process_request(stream, is_last, is_closed, leave_gzip_only) || is_closed;
    return stream.take_answer();
  }

 private:
  /// httplib prefers Brotli, at its highest quality: compressing a status of 2 MB would occupy this thread for 4 s.
  static void leave_gzip_only(httplib::Request& request) {
    const bool takes_gzip = request.get_header_value("Accept-Encoding").find("gzip") != std::string::npos;
    request.headers.erase("Accept-Encoding");
    if (takes_gzip) request.headers.emplace("Accept-Encoding", "gzip");
  }
};

class HttpListener final : public BoundListener {
 public:
  HttpListener(const HttpBackend& backend, const std::optional<net::ClusterKey>& key,
               std::optional<HttpCertificate> certificate)
      : access_(key),
        api_(backend, [this](const std::function<void(TimeNs)>& work) { return calls_.call(work, kOwnerMax); }),
        connections_([this](std::string_view request, bool& is_last) { return parser_.answer(request, is_last); },
                     [this](const std::string& authorization) { return access_.may_send_body(authorization); },
                     std::move(certificate)) {
    parser_.set_pre_routing_handler([this](const httplib::Request& request, httplib::Response& response) {
      const auto refusal = access_.refusal(request.method, request.path, request.get_header_value("Authorization"));
      if (!refusal) return httplib::Server::HandlerResponse::Unhandled;
      ++api_.num_refused;
      const HttpAnswer answer = http_error(refusal->status, refusal->why);
      response.status = answer.status;
      response.set_content(answer.body, answer.content_type);
      if (answer.status == 401)
        response.set_header("WWW-Authenticate", "Basic realm=\"kvferry\"");  // makes a browser ask for the token
      return httplib::Server::HandlerResponse::Handled;
    });
    const auto handler = [this](const httplib::Request& request, httplib::Response& response) {
      const HttpAnswer answer = api_.answer(request.method, request.path, request.body);
      response.status = answer.status;
      response.set_content(answer.body, answer.content_type);
    };
    parser_.set_payload_max_length(kHttpBodyBytesMax);
    parser_.set_keep_alive_max_count(1U << 30);
    parser_.Get(".*", handler);
    parser_.Post(".*", handler);
    parser_.set_error_handler([](const httplib::Request& request, httplib::Response& response) {
      if (!response.body.empty()) return;
      const bool is_other = !request.method.empty() && request.method != "GET" && request.method != "POST";
      const std::string why = response.status == 413   ? "the body is longer than 16 MiB, which is the limit"
                              : response.status == 414 ? "the URL is longer than 8192 bytes, which is the limit"
                              : is_other ? request.method + " requests are not served; allowed: GET and POST"
                                         : "this HTTP request is malformed in its line, headers or length";
      const HttpAnswer answer = http_error(response.status, why);
      response.set_content(answer.body, answer.content_type);
    });
  }
  ~HttpListener() override { calls_.close(); }

  Result<void> listen(const net::HostPort& address) {
    const std::uint16_t port = KVFERRY_TRY(connections_.start(address));
    address_ = net::to_text({address.host, port});
    return {};
  }

  const std::string& address() const override { return address_; }
  int fd() const override { return calls_.fd(); }
  bool serve(TimeNs now) override { return calls_.take(now); }

 private:
  OwnerCalls calls_;
  const HttpAccess access_;
  HttpApi api_;
  HttpParser parser_;
  std::string address_;
  HttpConnections connections_;
};

}  // namespace

Result<std::unique_ptr<BoundListener>> listen_http(const net::HostPort& address, const HttpBackend& backend,
                                                   const std::optional<net::ClusterKey>& key,
                                                   std::optional<HttpCertificate> certificate) {
  auto listener = std::make_unique<HttpListener>(backend, key, std::move(certificate));
  KVFERRY_TRY(listener->listen(address));
  return std::unique_ptr<BoundListener>(std::move(listener));
}

}  // namespace kvferry::controller
