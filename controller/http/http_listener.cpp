#include "controller/http/http_listener.h"

#include <thread>
#include <utility>

#include "controller/http/http_api.h"
#include "controller/http/owner_calls.h"
#include "controller/http/timed_server.h"
#include "transport/base/net/host_port.h"

namespace kvferry::controller {
namespace {

class HttpListener final : public BoundListener {
 public:
  HttpListener(const HttpOptions& options, const HttpBackend& backend)
      : api_(backend, [this, timeout = options.owner_max](
                          const std::function<void(TimeNs)>& work) { return calls_.call(work, timeout); }),
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

  Result<void> listen(const HttpOptions& options) {
    int port = options.port;
    if (port == 0)
      port = server_.bind_to_any_port(options.host);
    else if (!server_.bind_to_port(options.host, port))
      port = -1;
    if (port < 0)
      return Error{ErrorCode::kUnavailable, fmt::format("cannot listen on {}: port in use or address not local",
                                                        net::to_text({options.host, options.port}))};
    address_ = net::to_text({options.host, static_cast<std::uint16_t>(port)});
    accept_thread_ = std::thread([this] { server_.listen_after_bind(); });
    while (!server_.is_running())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // stop() has no effect before
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

Result<std::unique_ptr<BoundListener>> listen_http(const HttpOptions& options, const HttpBackend& backend) {
  auto listener = std::make_unique<HttpListener>(options, backend);
  if (Result<void> listening = listener->listen(options); !listening) return std::move(listening).error();
  return std::unique_ptr<BoundListener>(std::move(listener));
}

Result<HttpOptions> parse_http_address(const std::string& text) {
  const Result<net::HostPort> address = net::parse_host_port(text);
  if (!address) return address.error();
  HttpOptions options;
  options.host = address->host;
  options.port = address->port;
  return options;
}

}  // namespace kvferry::controller
