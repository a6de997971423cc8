// The controller's HTTP listener: metrics, the status page, and the API for routers.
#pragma once

#include <memory>
#include <string>

#include "controller/api/listener.h"
#include "controller/http/http_api.h"

namespace kvferry::controller {

struct HttpOptions {
  std::string host = "127.0.0.1";
  std::uint16_t port = 0;        // 0: any free port
  std::size_t num_threads = 16;  // concurrent requests
  std::size_t waiting_max = 64;  // connections waiting for a thread; further ones get a 503
  std::size_t body_bytes_max = std::size_t{16} << 20;
  TimeNs request_max = 10 * kSecond;  // from the first byte of a request to its last
  TimeNs answer_max = 10 * kSecond;   // for the client to read the answer
  TimeNs idle_max = 5 * kSecond;      // between two requests on a connection
  TimeNs owner_max = 2 * kSecond;     // until the owner thread starts a call
};

/// Reads, parses and answers requests on its own threads; take() runs their calls into the directories on the owner
/// thread. Threads: those of Listener.
class HttpListener : public Listener {
 public:
  /// Starts to listen. kUnavailable: the port is in use, or the address is not local.
  static Result<std::unique_ptr<HttpListener>> bind(const HttpOptions& options, HttpBackend backend);
  /// The actual address, e.g. "127.0.0.1:41234".
  virtual const std::string& address() const = 0;
};

/// Parses HOST:PORT. kInvalidArgument: `text` has another form.
Result<HttpOptions> parse_http_address(const std::string& text);

}  // namespace kvferry::controller
