#include "controller/http/http_listener.h"

#include <httplib.h>

#include <functional>
#include <memory>
#include <string_view>
#include <utility>

#include "controller/http/http_access.h"
#include "controller/http/http_api.h"
#include "controller/http/http_connections.h"
#include "controller/http/http_queues.h"

namespace kvferry::controller {
namespace {

constexpr TimeNs kOwnerMax = 2 * kSecond;  // limit on the time until the owner thread starts a call

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
  const SteadyClock clock_;
  OwnerCalls calls_{clock_};
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
