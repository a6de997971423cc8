// A controller's status as JSON: for `kvferry status --json` and /status alike.
#pragma once

#include <nlohmann/json.hpp>

#include "controller/api/status.h"

namespace kvferry::controller {

/// Who serves where, for routers.
nlohmann::json nodes_json(const Status& status);
nlohmann::json status_json(const Status& status, const std::string& endpoint);

}  // namespace kvferry::controller
