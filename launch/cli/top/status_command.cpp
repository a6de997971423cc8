#include <memory>
#include <nlohmann/json.hpp>

#include "controller/api/status.h"
#include "controller/http/http_views.h"
#include "controller/http/report_views.h"
#include "launch/cli/commands.h"
#include "launch/cli/controller_settings.h"
#include "launch/cli/top/node_rows.h"
#include "transport/base/printable.h"

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
    fmt::print("  event log {}: {}, {}; {} bytes not confirmed yet, entries lost in {} gaps{}\n", scale.event_log,
               scale.log_ok ? "ok" : "unreachable",
               scale.log_writer ? "written by this replica" : "written by another replica", scale.log_lag_bytes,
               scale.log_holes, trouble(scale.log_trouble));
}

std::string text_or_dash(const std::string& text) { return text.empty() ? "-" : printable(text); }

Table nodes_table(const Status& status) {
  Table table{{"NAMESPACE", "ENGINE", "INCARNATION", "ROLE", "VERSION", "ENDPOINT", "SERVES", "LOAD", "CHUNKS",
               "LAST MESSAGE"}};
  for (const controller::NodeStatus& node : status.nodes) {
    table.push_back({text_or_dash(node.name_space), printable(node.engine_id.value),
                     std::to_string(node.incarnation.value), text_or_dash(node.role), text_or_dash(node.version),
                     printable(node.endpoint), text_or_dash(node.serves), std::to_string(node.load),
                     std::to_string(node.num_chunks),
                     fmt::format("{:.1f} s ago{}", static_cast<double>(node.heartbeat_age_ms) / 1000,
                                 node.is_drained   ? ", drained"
                                 : node.is_leaving ? fmt::format(", draining ({} chunks left)", node.num_to_replicate)
                                                   : "")});
  }
  return table;
}

Table pools_table(const std::vector<NodeRow>& rows) {
  Table table{{"POOL OF", "USED", "CAPACITY", "FILL", "PINNED", "HIT RATE", "FAILURES", "LAST FAILURE"}};
  for (const NodeRow& row : rows) {
    if (!row.has_report || row.state == "lost") continue;
    table.push_back({row.name + (row.state == "stale" ? " (stale)" : ""), bytes_text(row.chunks * row.chunk_bytes),
                     bytes_text(row.slots * row.chunk_bytes), share_text(row.fill),
                     bytes_text(row.pinned * row.chunk_bytes), row.hit ? share_text(*row.hit) : "-",
                     std::to_string(row.num_failures),
                     row.failed_ago_ms ? fmt::format("{} ago: {}", age_text(*row.failed_ago_ms), row.failure) : "-"});
  }
  return table;
}

/// Returns a heading, and a row for each path that a registered node has reported.
Table paths_table(const Status& status) {
  const NodeNames names = names_of(status);
  Table table{{"FROM", "TO", "BY", "PATH", "GB/S NOW", "GB/S LAST", "LIMIT", "MOVED", "FAILED CHUNKS", "MEMORY"}};
  for (const controller::NodeStatus& node : status.nodes) {
    if (!node.report) continue;
    for (const controller::PathReport& path : node.report->paths) {
      const PathEnds ends = ends_of(node, path, names);
      table.push_back({ends.from, ends.to, path.is_push ? "push" : "pull", text_or_dash(path.path),
                       controller::is_fresh(node) ? fmt::format("{:.2f}", path.gb_per_s) : "-",
                       fmt::format("{:.2f}", path.last_gb_per_s),
                       path.limit_gb_per_s > 0 ? fmt::format("{:.2f}", path.limit_gb_per_s) : "-",
                       bytes_text(path.bytes), std::to_string(path.num_failed), text_or_dash(path.memory)});
    }
  }
  return table;
}

Table lost_table(const std::vector<NodeRow>& rows) {
  Table table{{"LOST NODE", "ROLE", "SINCE", "LAST FAILURE"}};
  for (const NodeRow& row : rows)
    if (row.state == "lost")
      table.push_back({row.name, row.role, age_text(row.ago_ms), row.failure.empty() ? "-" : row.failure});
  return table;
}

void print_status(const Status& status, const std::string& endpoint) {
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
  if (!status.nodes.empty()) fmt::print("{}", table_text(nodes_table(status)));
  const std::vector<NodeRow> rows = node_rows(status);
  for (const Table& table : {pools_table(rows), paths_table(status), lost_table(rows)})
    if (table.size() > 1) fmt::print("\n{}", table_text(table));
}

Result<void> run(const SettingFlags& flags, bool as_json) {
  const auto [endpoint, key] = KVFERRY_TRY(controller_of(flags));
  const Status status = KVFERRY_TRY(controller::fetch_status(endpoint, kControllerTimeoutMs, key));
  if (as_json)
    fmt::print("{}\n",
               controller::status_json(status, endpoint).dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
  else
    print_status(status, endpoint);
  return {};
}

}  // namespace

Run add_status_command(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("status", "Show a controller's nodes, their pools and paths, and its counters");
  auto flags = std::make_shared<SettingFlags>();
  auto as_json = std::make_shared<bool>(false);
  add_controller_option(*command, *flags);
  command->add_flag("--json", *as_json, "Print one JSON object with all counters instead of a table");
  return [flags, as_json] { return run(*flags, *as_json); };
}

}  // namespace kvferry::cli
