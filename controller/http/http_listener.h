// The controller's HTTP listener: metrics, the status page, and the API for routers.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "controller/api/listener.h"
#include "controller/directory/sessions.h"
#include "controller/engines/engine_events_listener.h"
#include "controller/http/http_socket.h"
#include "transport/base/net/cluster_key.h"
#include "transport/base/net/host_port.h"

namespace kvferry::controller {

/// The parts of the server that the HTTP API uses. Only the owner thread may use them.
struct HttpBackend {
  Sessions& sessions;
  EngineDirectory& engines;
  EngineEventsListener& events;
  std::string endpoint;  // address of the ZeroMQ listener; only displayed
};

/// Makes a listener that reads, parses and answers requests on threads of its own; its serve() runs the threads' calls
/// into `backend` on the owner thread. With a `key`, the listener refuses requests that HttpAccess does not allow; with
/// a `certificate`, clients must use HTTPS. Port 0 means any free port; the listener's address has the port in use,
/// e.g. "127.0.0.1:41234". Errors: those of HttpConnections::start().
Result<std::unique_ptr<BoundListener>> listen_http(const net::HostPort& address, const HttpBackend& backend,
                                                   const std::optional<net::ClusterKey>& key,
                                                   std::optional<HttpCertificate> certificate);

}  // namespace kvferry::controller
