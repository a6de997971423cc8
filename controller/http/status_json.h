// A controller's status as JSON, for `kvferry status --json` and GET /status.
#pragma once

#include <nlohmann/json.hpp>

#include "controller/api/status.h"

namespace kvferry::controller {

/// The nodes with what a router needs to know of them (GET /nodes).
nlohmann::json nodes_json(const Status& status);
nlohmann::json status_json(const Status& status, const std::string& endpoint);

}  // namespace kvferry::controller
