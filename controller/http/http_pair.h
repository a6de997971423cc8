// POST /pair: which prefill and which decode node a prompt should go to. And what all answers are made with.
#pragma once

#include <nlohmann/json.hpp>

#include "controller/http/http_api.h"
#include "controller/http/http_request.h"

namespace kvferry::controller {

/// Keys are made on the caller's thread; the owner looks them up and chooses.
HttpAnswer pair_answer(const HttpBackend& backend, const OnOwner& on_owner, const HttpRequest& request);

HttpAnswer http_ok(const nlohmann::json& value);
HttpAnswer http_failed(const Error& error);
HttpAnswer http_busy();

}  // namespace kvferry::controller
