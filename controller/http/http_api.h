// What the controller answers over HTTP, without sockets: JSON in and out, metrics and the status page.
//
// /register, /unregister, /query and /query_by_hash have the shape of the KV cache indexer API that routers speak to
// Mooncake's and Dynamo's indexers; /score says who is best.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "controller/directory/directory.h"
#include "controller/engines/engine_events_listener.h"
#include "controller/directory/pairing.h"
#include "controller/api/status.h"

namespace kvferry::controller {

struct HttpAnswer {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
};

/// Runs `work` on the owner thread and waits for it. False: it was not done in time, and won't be.
using OnOwner = std::function<bool(const std::function<void(TimeNs now)>& work)>;

/// What of the server the API sees; used on the owner thread alone.
struct HttpBackend {
  std::function<Status(TimeNs now)> status;
  std::string endpoint;  // the ZeroMQ one, for people
  EngineDirectory* engines = nullptr;
  EngineEventsListener* events = nullptr;
  Directory* directory = nullptr;
  std::shared_ptr<Pairing> pairing = std::make_shared<Pairing>();
};

class HttpApi {
 public:
  HttpApi(HttpBackend backend, OnOwner on_owner) : backend_(std::move(backend)), on_owner_(std::move(on_owner)) {}

  /// Threads: any number; parses and writes on the caller's, and asks the owner in between. Never throws.
  HttpAnswer answer(const std::string& method, const std::string& path, const std::string& body) const;

 private:
  HttpBackend backend_;
  OnOwner on_owner_;
};

/// The answer to what is wrong with a request: one sentence.
HttpAnswer http_error(int status, const std::string& sentence);

}  // namespace kvferry::controller
