// Blocking HTTP requests to etcd's JSON gateway, used by the threads of etcd.cpp.
#pragma once

#include <httplib.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "controller/scale/etcd.h"
#include "controller/scale/etcd_messages.h"
#include "transport/base/net/tcp_socket.h"

namespace kvferry::controller::scale {

using Milliseconds = std::chrono::milliseconds;

/// One thread's connection to etcd. It goes to one member of the cluster at a time.
class EtcdGateway {
 public:
  explicit EtcdGateway(const EtcdOptions& options) : options_(options) {}

  /// Sends a request to the current member. kUnavailable: no reply arrived, or the reply is empty or too long; the
  /// request may have been executed. kCancelled: stop() was called before, so the request was not sent.
  Result<std::string> post(const HttpPost& what, std::int64_t timeout_ms) {
    std::string body;
    const Result<void> done = stream(what, timeout_ms, [&](std::string_view bytes) {
      body += bytes;
      return body.size() <= options_.bytes_max;
    });
    if (body.size() > options_.bytes_max)
      return Error{
          ErrorCode::kUnavailable,
          fmt::format("etcd at {} sent a reply of more than {} bytes, which is the limit", name(), options_.bytes_max)};
    // The body is used even if `done` is an error: httplib fails on the trailers that the gateway sends after error
    // replies. The caller finds out if the body is incomplete, because such a body is not valid JSON.
    if (body.empty()) {
      if (!done) return done.error();
      return Error{ErrorCode::kUnavailable, fmt::format("etcd at {} sent an empty reply", name())};
    }
    return body;
  }

  /// Sends a request and passes the reply's body to `receive` as it arrives. kUnavailable: the request failed, nothing
  /// arrived for `quiet_ms`, or `receive` returned false, which ends the request. kCancelled: as for post().
  Result<void> stream(const HttpPost& what, std::int64_t quiet_ms,
                      const std::function<bool(std::string_view)>& receive) {
    const std::shared_ptr<httplib::Client> client = connected();
    if (!client) return Error{ErrorCode::kCancelled, "the etcd client is stopping"};
    client->set_read_timeout(Milliseconds(quiet_ms));
    httplib::Request request;
    request.method = "POST";
    request.path = what.path;
    request.body = what.body;
    request.headers = {{"Content-Type", "application/json"}, {"Grpc-Metadata-Hasleader", "true"}};
    if (!token_.empty()) request.headers.emplace("Authorization", token_);
    request.content_receiver = [&](const char* bytes, std::size_t size, std::uint64_t, std::uint64_t) {
      return receive({bytes, size});
    };
    const httplib::Result result = client->send(request);
    if (result) return {};
    return Error{ErrorCode::kUnavailable,
                 fmt::format("the request to etcd at {} failed: {}", name(), httplib::to_string(result.error()))};
  }

  /// Logs in if the URL has a user and there is no login token yet.
  Result<void> log_in() {
    const ServiceUrl& url = options_.url.members[member_];
    if (url.user.empty() || !token_.empty()) return {};
    const std::string body = KVFERRY_TRY(post(login_of(url.user, url.password), options_.request_ms));
    Result<std::string> token = token_of(body);
    if (!token) return std::move(token).error().with(fmt::format("cannot log in to etcd at {}", name()));
    token_ = std::move(*token);
    return {};
  }
  void log_out() { token_.clear(); }

  void next_member() {
    const std::lock_guard lock(mutex_);
    member_ = (member_ + 1) % options_.url.members.size();
    client_.reset();
    token_.clear();
  }

  /// Interrupts the current request, unless it is still connecting, and fails later ones. Threads: any.
  void stop() {
    const std::lock_guard lock(mutex_);
    is_stopped_ = true;
    if (client_) client_->stop();
  }

 private:
  std::string name() const { return options_.url.members[member_].host_port(); }

  std::shared_ptr<httplib::Client> connected() {
    const std::lock_guard lock(mutex_);
    if (is_stopped_) return nullptr;
    if (!client_) {
      const ServiceUrl& url = options_.url.members[member_];
      client_ = std::make_shared<httplib::Client>(url.address.host, url.address.port);
      client_->set_socket_options([](socket_t socket) { net::set_tcp_options(socket); });
      client_->set_keep_alive(true);
      client_->set_connection_timeout(Milliseconds(options_.connect_ms));
      client_->set_write_timeout(Milliseconds(options_.request_ms));
    }
    return client_;
  }

  const EtcdOptions& options_;
  std::size_t member_ = 0;
  std::string token_;
  std::mutex mutex_;  // guards client_ and is_stopped_
  std::shared_ptr<httplib::Client> client_;
  bool is_stopped_ = false;
};

}  // namespace kvferry::controller::scale
