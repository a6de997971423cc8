#include <algorithm>
#include <array>
#include <memory>
#include <nlohmann/json.hpp>

#include "controller/endpoint.h"
#include "controller/status.h"
#include "controller/status_json.h"
#include "launch/cli/commands.h"
#include "launch/cli/settings.h"

namespace kvferry::cli {
namespace {

using controller::Status;

constexpr std::int64_t kTimeoutMs = 2000;

const Setting kSettings[] = {
    {"controller", "tcp://127.0.0.1:14600", "tcp://HOST:PORT with a port of 1 to 65535, or ipc://PATH",
     [](std::string_view value) {
       return static_cast<bool>(controller::check_endpoint(value, controller::EndpointUse::kConnect));
     }},
};

void print_table(const Status& status, const std::string& endpoint) {
  using Row = std::array<std::string, 7>;
  std::vector<Row> rows{{"NAMESPACE", "ENGINE", "INCARNATION", "ROLE", "ENDPOINT", "CHUNKS", "LAST HEARD"}};
  for (const controller::NodeStatus& node : status.nodes) {
    rows.push_back({node.name_space.empty() ? "-" : node.name_space, node.engine_id, std::to_string(node.incarnation),
                    node.role.empty() ? "-" : node.role, node.endpoint, std::to_string(node.num_chunks),
                    fmt::format("{:.1f} s ago", static_cast<double>(node.heartbeat_age_ms) / 1000)});
  }
  std::array<std::size_t, std::tuple_size_v<Row>> widths{};
  for (const Row& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  fmt::print("controller {}, version {}, up {:.1f} s\n", endpoint, status.version,
             static_cast<double>(status.uptime_ms) / 1000);
  fmt::print("look-ups served: {} ({} with a holder); nodes: {}\n", status.counters.lookups,
             status.counters.lookup_hits, status.nodes.size());
  if (status.nodes.empty()) return;
  for (const Row& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) line += fmt::format("{:<{}}  ", row[i], widths[i]);
    fmt::print("{}\n", line.substr(0, line.find_last_not_of(' ') + 1));
  }
}

Result<void> run(const Values& flags, bool as_json) {
  Result<Values> values = resolve(kSettings, flags, std::nullopt);
  if (!values) return std::move(values).error();
  const std::string& endpoint = values->at("controller");
  const Result<Status> status = controller::fetch_status(endpoint, kTimeoutMs);
  if (!status) return status.error();
  if (as_json)
    fmt::print(
        "{}\n",
        controller::status_json(*status, endpoint).dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
  else
    print_table(*status, endpoint);
  return {};
}

}  // namespace

Run add_status_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("status", "Show a controller's nodes, the chunks they hold, and its counters");
  auto flags = std::make_shared<Values>();
  auto as_json = std::make_shared<bool>(false);
  command->add_option_function<std::string>(
      "--controller", [flags](const std::string& value) { (*flags)["controller"] = value; },
      fmt::format("Which one: {}; also KVFERRY_CONTROLLER [{}]", kSettings[0].allowed, kSettings[0].fallback));
  command->add_flag("--json", *as_json, "Print one JSON object with all counters instead of a table");
  return [flags, as_json] { return run(*flags, *as_json); };
}

}  // namespace kvferry::cli
