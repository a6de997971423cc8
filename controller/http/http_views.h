// What GET requests return: status, engines, metrics and the status page. `kvferry status --json` prints status_json().
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "controller/api/status.h"
#include "controller/engines/engine_directory.h"

namespace kvferry::controller {

struct ControllerView {
  Status status;
  std::string endpoint;
  std::vector<EngineStatus> engines;
  std::vector<NamespaceStatus> namespaces;
  std::uint64_t messages_malformed = 0;  // number of malformed messages from engines
  std::uint64_t http_refused = 0;        // number of HTTP requests refused because they lacked the token that they need
};

/// Returns the nodes, with what a router needs to know about each of them (GET /nodes).
nlohmann::json nodes_json(const Status& status);
nlohmann::json status_json(const Status& status, const std::string& endpoint);
/// Returns status_json(), plus the engines and their namespaces (GET /status).
nlohmann::json view_json(const ControllerView& view);
/// Returns what the status page shows (GET /overview). For a thousand nodes it is less than an eighth as
/// long as view_json().
nlohmann::json overview_json(const ControllerView& view);
/// Returns the value of "engines" or "namespaces" in view_json() and overview_json().
nlohmann::json engines_json(const ControllerView& view);
nlohmann::json namespaces_json(const ControllerView& view);
nlohmann::json replica_json(const ScaleStatus& replica);
nlohmann::json state_json(const StateStatus& state);
/// Returns the engines' endpoints by instance, in the form that other KV cache indexers use (GET /workers).
nlohmann::json workers_json(const ControllerView& view);
/// Returns the metrics in Prometheus' text format (GET /metrics).
std::string metrics_text(const ControllerView& view);
/// Returns a self-contained HTML page that fetches /overview.
std::string_view status_page();

}  // namespace kvferry::controller
