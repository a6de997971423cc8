// The controller's answers to HTTP requests, without sockets: JSON, metrics and the status page.
//
// /register, /unregister, /query and /query_by_hash have the shape of the KV cache indexer API that routers use with
// Mooncake's and Dynamo's indexers; /score ranks the engines for a prompt.
#pragma once

#include <atomic>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "controller/directory/pairing.h"
#include "controller/http/http_listener.h"
#include "controller/http/http_request.h"

namespace kvferry::controller {

constexpr std::uint64_t kBlockSizeMax = 65536;
constexpr std::uint64_t kRankMax = 65535;
constexpr const char* kTierNames[kNumTiers] = {"gpu", "cpu", "disk", "remote"};

struct HttpAnswer {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
};

/// Answers HTTP requests. Threads: any number. Parses requests and formats answers on the calling thread, but uses
/// `backend` only on the owner thread, which runs the server's loop.
class HttpApi {
 public:
  /// Runs `work` on the owner thread and waits for it. kUnavailable: `work` did not start, and will not start any more.
  using OnOwner = std::function<Result<void>(const std::function<void(TimeNs now)>& work)>;

  HttpApi(const HttpBackend& server, OnOwner on_owner) : backend(server), on_owner_(std::move(on_owner)) {}

  /// Answers one request. Never throws.
  HttpAnswer answer(const std::string& method, const std::string& path, const std::string& body);

  /// Returns the result of work(now) on the owner thread; work() must not throw. Throws HttpFailure if work() did not
  /// run.
  template <class Work>
  auto ask_owner(const Work& work) const {
    std::optional<decltype(work(TimeNs{}))> result;
    check(on_owner_([&](TimeNs now) { result.emplace(work(now)); }));
    return *std::move(result);
  }

  HttpBackend backend;
  Pairing pairing;                             // used on the owner thread only
  std::atomic<std::uint64_t> num_refused = 0;  // requests refused because they lacked the token that they need

 private:
  OnOwner on_owner_;
};

/// Returns an answer with the body {"error": sentence}.
HttpAnswer http_error(int status, const std::string& sentence);

/// Handles a POST request and returns the answer's JSON. Throws HttpFailure, whose code determines the HTTP status.
using HttpHandler = nlohmann::json(HttpApi&, const HttpRequest&);

// http_engines.cpp: registers engines that publish KV events, and reports how much of a prompt each of them has
HttpHandler handle_register, handle_unregister, handle_query, handle_query_by_hash, handle_score;
// http_pair.cpp: chooses a prefill node and a decode node for a prompt
HttpHandler handle_pair;

}  // namespace kvferry::controller
