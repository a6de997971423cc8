// The controller's HTTP listener: metrics, the status page, and the API for routers.
#pragma once

#include <memory>
#include <string>

#include "controller/api/listener.h"
#include "controller/directory/sessions.h"
#include "controller/engines/engine_events_listener.h"

namespace kvferry::controller {

struct HttpOptions {
  std::string host = "127.0.0.1";
  std::uint16_t port = 0;        // 0: any free one
  std::size_t num_threads = 16;  // concurrent requests
  std::size_t waiting_max = 64;  // connections waiting for a thread; further ones get a 503
  std::size_t body_bytes_max = std::size_t{16} << 20;
  TimeNs request_max = 10 * kSecond;  // from the first byte of a request to its last
  TimeNs answer_max = 10 * kSecond;   // for the client to read the answer
  TimeNs idle_max = 5 * kSecond;      // between two requests on a connection
  TimeNs owner_max = 2 * kSecond;     // until the owner thread starts a call
};

/// The parts of the server that the API uses, on the owner thread only.
struct HttpBackend {
  Sessions& sessions;
  EngineDirectory& engines;
  EngineEventsListener& events;
  std::string endpoint;  // address of the ZeroMQ listener; only displayed
};

/// Reads, parses and answers requests on threads of its own; serve() runs their calls into the directories on the owner
/// thread. The listener's address is e.g. "127.0.0.1:41234".
/// kUnavailable: the port is in use, or the address is not local.
Result<std::unique_ptr<BoundListener>> listen_http(const HttpOptions& options, const HttpBackend& backend);

/// Parses HOST:PORT. kInvalidArgument: `text` has another form.
Result<HttpOptions> parse_http_address(const std::string& text);

}  // namespace kvferry::controller
