// The answer to GET /overview, which the status page requests every two seconds while it is visible. To keep the answer
// small, it has the names of the nodes' fields only once, and only those entries of the lists in the nodes' reports
// that the page shows.
#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "controller/http/http_views.h"
#include "controller/http/report_views.h"

namespace kvferry::controller {
namespace {

using nlohmann::json;

constexpr std::size_t kListMax = 20;  // limit on each of the lists in an answer: failures, paths, prefixes

struct Shown {
  const NodeStatus& node;
  Flow flow{};
  std::optional<std::uint64_t> lost_ago_ms{};  // time since the node was lost; empty: the node is registered
  /// Returns how long ago a failure in the node's report was.
  std::uint64_t ago_ms(const FailureReport& failure) const {
    return failure.ago_ms + node.report_age_ms + lost_ago_ms.value_or(0);
  }
};

template <auto kField>
json of_node(const Shown& shown) {
  return shown.node.*kField;
}
template <auto kField>
json of_report(const Shown& shown) {
  return shown.node.report ? json((*shown.node.report).*kField) : json();
}
const FailureReport* last_failure(const Shown& shown) {
  return shown.node.report && !shown.node.report->failures.empty() ? &shown.node.report->failures.front() : nullptr;
}

struct Column {
  const char* name;
  json (*value)(const Shown&);  // returns the column's value; null: the node has none
};
constexpr Column kColumns[] = {
    {"engine_id", [](const Shown& shown) -> json { return shown.node.engine_id.value; }},
    {"namespace", of_node<&NodeStatus::name_space>},
    {"role", of_node<&NodeStatus::role>},
    {"endpoint", of_node<&NodeStatus::endpoint>},
    {"serves", of_node<&NodeStatus::serves>},
    {"host", [](const Shown& shown) -> json { return shown.node.details.host; }},
    {"version", of_node<&NodeStatus::version>},
    {"chunks", of_node<&NodeStatus::num_chunks>},
    {"load", of_node<&NodeStatus::load>},
    {"heartbeat_age_ms", of_node<&NodeStatus::heartbeat_age_ms>},
    {"leaving", of_node<&NodeStatus::is_leaving>},
    {"drained", of_node<&NodeStatus::is_drained>},
    {"to_move", of_node<&NodeStatus::num_to_replicate>},
    {"lost_ago_ms", [](const Shown& shown) { return shown.lost_ago_ms ? json(*shown.lost_ago_ms) : json(); }},
    {"report_age_ms", [](const Shown& shown) { return shown.node.report ? json(shown.node.report_age_ms) : json(); }},
    {"is_stale", [](const Shown& shown) -> json { return shown.node.report && !is_fresh(shown.node); }},
    {"num_slots", of_report<&NodeReport::num_slots>},
    {"num_chunks", of_report<&NodeReport::num_chunks>},
    {"num_pinned", of_report<&NodeReport::num_pinned>},
    {"chunk_bytes", of_report<&NodeReport::chunk_bytes>},
    {"transfers",
     [](const Shown& shown) {
       return shown.node.report ? json(shown.node.report->num_pulls + shown.node.report->num_pushes) : json();
     }},
    {"tokens", of_report<&NodeReport::tokens>},
    {"local_tokens", of_report<&NodeReport::local_tokens>},
    {"loaded_tokens", of_report<&NodeReport::loaded_tokens>},
    {"in_gb_per_s", [](const Shown& shown) -> json { return shown.flow.in_gb_per_s; }},
    {"out_gb_per_s", [](const Shown& shown) -> json { return shown.flow.out_gb_per_s; }},
    {"failure", [](const Shown& shown) { return last_failure(shown) ? json(last_failure(shown)->what) : json(); }},
    {"failed_ago_ms",
     [](const Shown& shown) { return last_failure(shown) ? json(shown.ago_ms(*last_failure(shown))) : json(); }},
};

json names_of_columns() {
  json names = json::array();
  for (const Column& column : kColumns) names.push_back(column.name);
  return names;
}

json row_of(const Shown& shown) {
  json row = json::array();
  for (const Column& column : kColumns) row.push_back(column.value(shown));
  return row;
}

template <class T, class Key>
void keep_largest(std::vector<T>& all, Key key) {
  const auto end = all.begin() + static_cast<std::ptrdiff_t>(std::min(all.size(), kListMax));
  std::ranges::partial_sort(all, end, std::greater<>(), key);
  all.erase(end, all.end());
}

json failures_json(const std::vector<Shown>& nodes) {
  std::vector<std::pair<const Shown*, const FailureReport*>> found;
  for (const Shown& shown : nodes) {
    if (!shown.node.report) continue;
    for (const FailureReport& failure : shown.node.report->failures) found.emplace_back(&shown, &failure);
  }
  keep_largest(found, [](const auto& one) { return -static_cast<double>(one.first->ago_ms(*one.second)); });
  json failures = json::array();
  for (const auto& [shown, failure] : found) {
    failures.push_back(*failure);
    failures.back()["node"] = shown->node.engine_id.value;
    failures.back()["ago_ms"] = shown->ago_ms(*failure);
  }
  return failures;
}

json paths_json(const Status& status) {
  std::vector<std::pair<const NodeStatus*, const PathReport*>> found;
  for (const NodeStatus& node : status.nodes) {
    if (!node.report) continue;
    for (const PathReport& path : node.report->paths) found.emplace_back(&node, &path);
  }
  keep_largest(found, [](const auto& one) { return std::pair(one.second->gb_per_s, one.second->bytes); });
  json paths = json::array();
  for (const auto& [node, path] : found) {
    paths.push_back(*path);
    paths.back()["node"] = node->engine_id.value;
    paths.back()["is_stale"] = !is_fresh(*node);
  }
  return paths;
}

json prefixes_json(const Status& status) {
  struct Prefix {
    std::string_view chunk{};
    double per_minute = 0;
    std::uint64_t num_nodes = 0;
  };
  std::map<std::string_view, Prefix> sums;
  for (const NodeStatus& node : status.nodes) {
    if (!node.report) continue;
    for (const PrefixReport& prefix : node.report->prefixes) {
      Prefix& sum = sums[prefix.chunk];
      sum = {prefix.chunk, sum.per_minute + prefix.per_minute, sum.num_nodes + 1};
    }
  }
  std::vector<Prefix> found;
  for (const auto& [chunk, sum] : sums) found.push_back(sum);
  keep_largest(found, [](const Prefix& one) { return one.per_minute; });
  json prefixes = json::array();
  for (const Prefix& one : found)
    prefixes.push_back({{"chunk", one.chunk}, {"per_minute", one.per_minute}, {"nodes", one.num_nodes}});
  return prefixes;
}

}  // namespace

json overview_json(const ControllerView& view) {
  const Status& status = view.status;
  auto flows = flows_of(status);
  std::vector<Shown> shown;
  for (const LostNode& one : status.lost) shown.push_back({.node = one.node, .lost_ago_ms = one.lost_ago_ms});
  for (const NodeStatus& node : status.nodes) shown.push_back({.node = node, .flow = flows[node.endpoint]});
  json nodes = json::array();
  for (const Shown& one : shown) nodes.push_back(row_of(one));
  return {{"controller", view.endpoint},
          {"version", status.version},
          {"uptime_ms", status.uptime_ms},
          {"insecure", status.insecure},
          {"lookups", status.counters.lookups},
          {"state", state_json(status.state)},
          {"replica", replica_json(status.scale)},
          {"columns", names_of_columns()},
          {"nodes", std::move(nodes)},
          {"failures", failures_json(shown)},
          {"paths", paths_json(status)},
          {"prefixes", prefixes_json(status)},
          {"engines", engines_json(view)},
          {"namespaces", namespaces_json(view)}};
}

}  // namespace kvferry::controller
