// The controller over HTTP: metrics, the status page, and what routers ask.
#pragma once

#include <memory>
#include <string>

#include "controller/api/listener.h"
#include "controller/http/http_api.h"

namespace kvferry::controller {

struct HttpOptions {
  std::string host = "127.0.0.1";
  int port = 0;                  // 0: any free one
  std::size_t num_threads = 16;  // requests at the same time
  std::size_t waiting_max = 64;  // connections that wait for a thread; more are answered 503
  std::size_t body_bytes_max = std::size_t{16} << 20;
  TimeNs request_max = 10 * kSecond;  // from a request's first byte to its last, however slowly it comes
  TimeNs answer_max = 10 * kSecond;   // for its answer to be taken
  TimeNs idle_max = 5 * kSecond;      // between two requests of a connection
  TimeNs owner_max = 2 * kSecond;     // for the owner thread to come to it
};

/// Requests are read, parsed and answered on threads of its own; what they want of the directories the owner does in
/// take(). Threads: as Listener.
class HttpListener : public Listener {
 public:
  /// Listens and serves from here on. kUnavailable: the address can't be listened on.
  static Result<std::unique_ptr<HttpListener>> bind(const HttpOptions& options, HttpBackend backend);
  /// Where it listens in fact, e.g. "127.0.0.1:41234".
  virtual const std::string& address() const = 0;
};

/// kInvalidArgument: not HOST:PORT with a port of 0 to 65535.
Result<HttpOptions> parse_http_address(const std::string& address);

}  // namespace kvferry::controller
