// What people and Prometheus see of a controller.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "controller/engines/engine_directory.h"
#include "controller/api/status.h"

namespace kvferry::controller {

struct ControllerView {
  Status status;
  std::string endpoint;
  std::vector<EngineStatus> engines;
  std::vector<NamespaceStatus> namespaces;
  std::uint64_t messages_malformed = 0;  // of engines
};

/// As `kvferry status --json`, and the engines.
nlohmann::json view_json(const ControllerView& view);
/// Engines by instance, as other indexers list them.
nlohmann::json workers_json(const ControllerView& view);
/// In Prometheus' text format.
std::string metrics_text(const ControllerView& view);
/// HTML that asks /status by itself and needs nothing else.
std::string_view status_page();

}  // namespace kvferry::controller
