#include "launch/cli/top/node_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "controller/http/report_views.h"
#include "transport/base/printable.h"

namespace kvferry::cli {
namespace {

using controller::LostNode;
using controller::NodeReport;
using controller::NodeStatus;
using controller::Status;

constexpr std::uint64_t kSilentMs = 1500;  // a node is shown as silent after three missed heartbeats
constexpr std::size_t kFailuresShown = 5;

std::string role_text(const std::string& role) {
  return role == "kv_producer" ? "prefill" : role == "kv_consumer" ? "decode" : role == "kv_both" ? "both" : "-";
}

NodeRow row_of(const NodeStatus& node, const controller::Flow& flow, const NodeNames& names) {
  NodeRow row;
  row.name = shown_name(node);
  row.role = role_text(node.role);
  row.load = node.load;
  row.ago_ms = node.heartbeat_age_ms;
  row.state = node.is_drained                              ? "drained"
              : node.is_leaving                            ? "draining"
              : node.heartbeat_age_ms > kSilentMs          ? "silent"
              : node.report && !controller::is_fresh(node) ? "stale"
                                                           : "ok";
  row.chunks = node.num_chunks;
  row.has_report = node.report != nullptr;
  if (!node.report) return row;
  const NodeReport& report = *node.report;
  row.chunks = report.num_chunks;
  row.slots = report.num_slots;
  row.pinned = report.num_pinned;
  row.chunk_bytes = report.chunk_bytes;
  if (row.slots > 0) row.fill = std::min(1.0, static_cast<double>(row.chunks) / static_cast<double>(row.slots));
  if (const double asked = report.tokens - report.local_tokens; asked >= 1)
    row.hit = std::min(1.0, report.loaded_tokens / asked);
  row.in_gb_per_s = flow.in_gb_per_s;
  row.out_gb_per_s = flow.out_gb_per_s;
  row.transfers = report.num_pulls + report.num_pushes;
  row.num_failures = report.num_failures;
  if (report.failures.empty()) return row;
  const controller::FailureReport& failure = report.failures.front();
  row.failed_ago_ms = failure.ago_ms + node.report_age_ms;
  row.failure = printable(failure.what);
  if (const auto peer = names.find(failure.peer); peer != names.end())
    row.failure += fmt::format(" ({})", peer->second);
  return row;
}

std::string bar(double share, std::size_t width) {
  const auto filled = static_cast<std::size_t>(std::lround(share * static_cast<double>(width)));
  return std::string(filled, '#') + std::string(width - filled, '.');
}

/// Returns a speed with two, one or no decimals, so that speeds below 100,000 GB/s fit a column of five characters.
std::string speed_text(double gb_per_s) {
  return gb_per_s < 0.005 ? "0" : fmt::format("{:.{}f}", gb_per_s, gb_per_s < 10 ? 2 : gb_per_s < 100 ? 1 : 0);
}

std::string cut(std::string text, std::size_t width) {
  if (text.size() > width) text.resize(width);
  return text;
}

}  // namespace

std::string shown_name(const NodeStatus& node) { return printable(short_name(node.engine_id.value)); }

NodeNames names_of(const Status& status) {
  NodeNames names;
  for (const LostNode& one : status.lost) names[one.node.endpoint] = shown_name(one.node);
  for (const NodeStatus& node : status.nodes) names[node.endpoint] = shown_name(node);
  return names;
}

PathEnds ends_of(const NodeStatus& reporter, const controller::PathReport& path, const NodeNames& names) {
  const auto known = names.find(path.peer);
  std::string peer = known == names.end() ? printable(path.peer) : known->second;
  return path.is_push ? PathEnds{shown_name(reporter), std::move(peer)}
                      : PathEnds{std::move(peer), shown_name(reporter)};
}

std::vector<NodeRow> node_rows(const Status& status) {
  auto flows = controller::flows_of(status);
  const NodeNames names = names_of(status);
  std::vector<NodeRow> rows;
  for (const NodeStatus& node : status.nodes) rows.push_back(row_of(node, flows[node.endpoint], names));
  for (const LostNode& one : status.lost) {
    rows.push_back(row_of(one.node, {}, names));
    rows.back().state = "lost";
    rows.back().ago_ms = one.lost_ago_ms;
    rows.back().transfers = rows.back().load = 0;
    if (rows.back().failed_ago_ms) *rows.back().failed_ago_ms += one.lost_ago_ms;
  }
  return rows;
}

void sort_rows(std::vector<NodeRow>& rows, std::string_view key) {
  if (key == "name") {
    std::ranges::stable_sort(rows, {}, &NodeRow::name);
    return;
  }
  const auto value = [&](const NodeRow& row) -> double {
    if (key == "pool") return row.fill;
    if (key == "hit") return row.hit.value_or(-1);
    if (key == "in") return row.in_gb_per_s;
    if (key == "out") return row.out_gb_per_s;
    if (key == "transfers") return static_cast<double>(row.transfers);
    if (key == "load") return static_cast<double>(row.load);
    return row.failed_ago_ms ? -static_cast<double>(*row.failed_ago_ms) : -1e18;
  };
  std::ranges::stable_sort(rows, std::greater<>(), value);
}

std::vector<std::string> top_lines(const Status& status, const std::vector<NodeRow>& rows, const std::string& endpoint,
                                   std::size_t width) {
  constexpr std::size_t kOtherColumns = 65;  // columns of a line without the node's name
  std::uint64_t used = 0, capacity = 0, transfers = 0;
  double in = 0, out = 0;
  for (const NodeRow& row : rows) {
    if (row.state == "lost") continue;
    if (row.has_report) used += row.chunks * row.chunk_bytes;
    capacity += row.slots * row.chunk_bytes;
    transfers += row.transfers;
    in += row.in_gb_per_s;
    out += row.out_gb_per_s;
  }
  std::vector<std::string> lines;
  lines.push_back(fmt::format("kvferry top: up {}, version {}, controller {}", age_text(status.uptime_ms),
                              printable(status.version), printable(endpoint)));
  lines.push_back(fmt::format("{} nodes, {} lost; pools {} of {}; {} transfers, {} GB/s", status.nodes.size(),
                              status.lost.size(), bytes_text(used), bytes_text(capacity), transfers,
                              speed_text(std::max(in, out))));
  lines.emplace_back();
  std::size_t name_width = 8;
  for (const NodeRow& row : rows) name_width = std::max(name_width, row.name.size());
  name_width = std::min(name_width, std::max<std::size_t>(8, width - std::min(width, kOtherColumns)));
  const auto line = [&](const auto&... cells) {
    lines.push_back(fmt::format("{:<{}} {:<8} {:<7} {:<13} {:>4} {:>5} {:>5} {:>4} {:>4} {:>6}", cells...));
  };
  line("NODE", name_width, "STATE", "ROLE", "POOL", "HIT", "IN", "OUT", "XFER", "REQ", "FAILED");
  for (const NodeRow& row : rows) {
    const bool is_known = row.has_report && row.state != "lost";
    const auto known = [&](std::string text) { return is_known ? std::move(text) : std::string("-"); };
    line(cut(row.name, name_width), name_width, row.state, row.role,
         known(fmt::format("{} {:>4}", bar(row.fill, 8), share_text(row.fill))),
         known(row.hit ? share_text(*row.hit) : "-"), known(speed_text(row.in_gb_per_s)),
         known(speed_text(row.out_gb_per_s)), known(std::to_string(row.transfers)),
         row.state == "lost" ? "-" : std::to_string(row.load),
         row.failed_ago_ms ? age_text(*row.failed_ago_ms) : std::string("-"));
  }
  if (rows.empty()) lines.emplace_back("no node is registered");
  std::vector<const NodeRow*> failed;
  for (const NodeRow& row : rows)
    if (row.failed_ago_ms) failed.push_back(&row);
  std::ranges::sort(failed, {}, [](const NodeRow* row) { return *row->failed_ago_ms; });
  if (!failed.empty()) lines.emplace_back();
  if (!failed.empty()) lines.emplace_back("last failures");
  failed.resize(std::min(failed.size(), kFailuresShown));
  for (const NodeRow* row : failed)
    lines.push_back(fmt::format("{:>6} ago  {}: {}", age_text(*row->failed_ago_ms), row->name, row->failure));
  for (std::string& text : lines) text = cut(std::move(text), width);
  return lines;
}

nlohmann::json rows_json(const std::vector<NodeRow>& rows) {
  nlohmann::json all = nlohmann::json::array();
  for (const NodeRow& row : rows) {
    all.push_back({{"node", row.name},
                   {"state", row.state},
                   {"role", row.role},
                   {"ago_ms", row.ago_ms},
                   {"has_report", row.has_report},
                   {"pool_bytes", row.slots * row.chunk_bytes},
                   {"pool_fill", row.fill},
                   {"hit_rate", nullptr},
                   {"in_gb_per_s", row.in_gb_per_s},
                   {"out_gb_per_s", row.out_gb_per_s},
                   {"transfers", row.transfers},
                   {"requests", row.load},
                   {"failure", nullptr}});
    if (row.hit) all.back()["hit_rate"] = *row.hit;
    if (row.failed_ago_ms) all.back()["failure"] = {{"what", row.failure}, {"ago_ms", *row.failed_ago_ms}};
  }
  return all;
}

std::string table_text(const Table& table) {
  std::vector<std::size_t> widths(table.at(0).size());
  for (const auto& row : table)
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  std::string text;
  for (const auto& row : table) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) line += fmt::format("{:<{}}  ", row[i], widths[i]);
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

std::string age_text(std::uint64_t ms) {
  const std::uint64_t s = ms / 1000;
  return s < 100 ? fmt::format("{} s", s) : s < 6000 ? fmt::format("{} min", s / 60) : fmt::format("{} h", s / 3600);
}

std::string bytes_text(std::uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  auto number = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; number >= 1000 && unit + 1 < std::size(kUnits); ++unit) number /= 1024;
  return fmt::format("{:.{}f} {}", number, unit == 0 || number >= 100 ? 0 : number >= 10 ? 1 : 2, kUnits[unit]);
}

std::string share_text(double share) { return fmt::format("{:.0f}%", share * 100); }

}  // namespace kvferry::cli
