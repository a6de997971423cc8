// What the controller answers over HTTP, without sockets: JSON requests, metrics and the status page.
//
// /register, /unregister, /query and /query_by_hash have the shape of the KV cache indexer API that routers use with
// Mooncake's and Dynamo's indexers; /score ranks the engines for a prompt.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "controller/api/status.h"
#include "controller/directory/directory.h"
#include "controller/directory/pairing.h"
#include "controller/engines/engine_events_listener.h"

namespace kvferry::controller {

struct HttpAnswer {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
};

/// Runs `work` on the owner thread and waits for it. kUnavailable: it did not run in time, and never will.
using OnOwner = std::function<Result<void>(const std::function<void(TimeNs now)>& work)>;

/// The parts of the server that the API uses, on the owner thread only.
struct HttpBackend {
  std::function<Status(TimeNs now)> status;
  std::string endpoint;  // address of the ZeroMQ listener; only displayed
  EngineDirectory* engines = nullptr;
  EngineEventsListener* events = nullptr;
  Directory* directory = nullptr;  // nullptr: /pair is off
  std::shared_ptr<Pairing> pairing = std::make_shared<Pairing>();
};

class HttpApi {
 public:
  HttpApi(HttpBackend backend, OnOwner on_owner) : backend_(std::move(backend)), on_owner_(std::move(on_owner)) {}

  /// Threads: any number. Parses and formats on the calling thread, and enters the owner thread in between. Never
  /// throws.
  HttpAnswer answer(const std::string& method, const std::string& path, const std::string& body) const;

 private:
  HttpBackend backend_;
  OnOwner on_owner_;
};

/// An answer with {"error": sentence}.
HttpAnswer http_error(int status, const std::string& sentence);

}  // namespace kvferry::controller
