// The POST requests of the HTTP API. A handler parses the request on the calling thread and uses the backend on the
// owner thread only. The error codes become HTTP statuses in http_api.cpp.
#pragma once

#include <nlohmann/json.hpp>

#include "controller/http/http_api.h"
#include "controller/http/http_request.h"

namespace kvferry::controller {

constexpr std::uint64_t kBlockSizeMax = 65536;
constexpr std::uint64_t kRankMax = 65535;
constexpr const char* kTierNames[kNumTiers] = {"gpu", "cpu", "disk", "remote"};

using HttpHandler = Result<nlohmann::json>(const HttpBackend&, const OnOwner&, const HttpRequest&);

// http_engines.cpp
HttpHandler handle_register, handle_unregister;
// http_prompts.cpp: how much of a prompt each engine has
HttpHandler handle_query, handle_query_by_hash, handle_score;
// http_pair.cpp: which prefill and which decode node to send a prompt to
HttpHandler handle_pair;

}  // namespace kvferry::controller
