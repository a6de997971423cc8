#include <algorithm>
#include <array>
#include <memory>
#include <nlohmann/json.hpp>

#include "controller/api/status.h"
#include "controller/http/http_views.h"
#include "launch/cli/commands.h"
#include "launch/cli/controller_settings.h"

namespace kvferry::cli {
namespace {

using controller::Status;

void print_replica(const controller::ScaleStatus& scale) {
  if (scale.name.empty()) return;
  std::vector<std::string> others;
  for (const controller::ReplicaStatus& replica : scale.replicas) {
    if (replica.name != scale.name) others.push_back(replica.name);
  }
  fmt::print("replica {}, others: {}\n", scale.name,
             others.empty() ? "none" : fmt::format("{}", fmt::join(others, ", ")));
  if (scale.name_taken)
    fmt::print("  another replica with this name started later; give each replica a name of its own with --replica\n");
  const auto trouble = [](const std::string& what) { return what.empty() ? what : ": " + what; };
  if (!scale.etcd.empty() && scale.etcd_ok)
    fmt::print("  etcd {}: ok{}\n", scale.etcd, trouble(scale.etcd_trouble));
  else if (!scale.etcd.empty())
    fmt::print("  etcd {}: unreachable for {:.1f} s{}\n", scale.etcd, static_cast<double>(scale.etcd_gone_ms) / 1000,
               trouble(scale.etcd_trouble));
  if (!scale.event_log.empty())
    fmt::print("  event log {}: {}, {}; {} bytes not confirmed yet, {} gaps{}\n", scale.event_log,
               scale.log_ok ? "ok" : "unreachable",
               scale.log_writer ? "written by this replica" : "written by another replica", scale.log_lag_bytes,
               scale.log_holes, trouble(scale.log_trouble));
}

void print_table(const Status& status, const std::string& endpoint) {
  using Row = std::array<std::string, 10>;
  std::vector<Row> rows{{"NAMESPACE", "ENGINE", "INCARNATION", "ROLE", "VERSION", "ENDPOINT", "SERVES", "LOAD",
                         "CHUNKS", "LAST MESSAGE"}};
  for (const controller::NodeStatus& node : status.nodes) {
    rows.push_back({node.name_space.empty() ? "-" : node.name_space, node.engine_id.value,
                    std::to_string(node.incarnation.value), node.role.empty() ? "-" : node.role,
                    node.version.empty() ? "-" : node.version, node.endpoint, node.serves.empty() ? "-" : node.serves,
                    std::to_string(node.load), std::to_string(node.num_chunks),
                    fmt::format("{:.1f} s ago{}", static_cast<double>(node.heartbeat_age_ms) / 1000,
                                node.is_drained   ? ", drained"
                                : node.is_leaving ? fmt::format(", draining ({} chunks left)", node.num_to_replicate)
                                                  : "")});
  }
  std::array<std::size_t, std::tuple_size_v<Row>> widths{};
  for (const Row& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  fmt::print("controller {}, version {}, up {:.1f} s\n", endpoint, status.version,
             static_cast<double>(status.uptime_ms) / 1000);
  fmt::print("lookups: {} ({} with a holder); nodes: {}\n", status.counters.lookups, status.counters.lookup_hits,
             status.nodes.size());
  const controller::StateStatus& state = status.state;
  if (state.folder.empty())
    fmt::print("state: none\n");
  else if (state.durable)
    fmt::print("state: {}\n", state.folder);
  else
    fmt::print("state: NOT kept on disk: {}\n", state.why_not);
  print_replica(status.scale);
  if (status.insecure) fmt::print("INSECURE: other hosts reach this controller without a cluster key\n");
  if (status.nodes.empty()) return;
  for (const Row& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) line += fmt::format("{:<{}}  ", row[i], widths[i]);
    fmt::print("{}\n", line.substr(0, line.find_last_not_of(' ') + 1));
  }
}

Result<void> run(const SettingFlags& flags, bool as_json) {
  const auto [endpoint, key] = KVFERRY_TRY(controller_of(flags));
  const Status status = KVFERRY_TRY(controller::fetch_status(endpoint, kControllerTimeoutMs, key));
  if (as_json)
    fmt::print("{}\n",
               controller::status_json(status, endpoint).dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
  else
    print_table(status, endpoint);
  return {};
}

}  // namespace

Run add_status_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("status", "Show a controller's nodes, the chunks they hold, and its counters");
  auto flags = std::make_shared<SettingFlags>();
  auto as_json = std::make_shared<bool>(false);
  add_controller_option(*command, *flags);
  command->add_flag("--json", *as_json, "Print one JSON object with all counters instead of a table");
  return [flags, as_json] { return run(*flags, *as_json); };
}

}  // namespace kvferry::cli
