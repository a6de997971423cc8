#include "controller/http/http_views.h"

#include <map>
#include <string_view>
#include <utility>

#include "controller/http/http_api.h"
#include "controller/http/http_metrics.h"
#include "controller/http/report_views.h"
#include "transport/base/chunk_key.h"

namespace kvferry::controller {

using nlohmann::json;

// The keys in the JSON are the names of the structs' fields.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Counters, lookups, lookup_keys, lookup_hits, chunks_published, chunks_evicted,
                                   chunks_dropped, heartbeats, nodes_registered, nodes_refused, nodes_expired,
                                   nodes_fenced, snapshots_wanted, messages_malformed, messages_unregistered,
                                   replies_dropped, resends_wanted, digests_differed, orders_sent, messages_taken,
                                   messages_sent, handshakes_refused, reports_malformed, messages_forbidden,
                                   peers_delayed)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StateStatus, folder, durable, why_not, log_bytes, snapshot_bytes, snapshot_age_ms,
                                   snapshots_written, records_loaded, load_ms)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ReplicaStatus, name, endpoint)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ScaleStatus, name, replicas, name_taken, etcd, etcd_ok, etcd_gone_ms, etcd_trouble,
                                   etcd_owed, event_log, log_ok, log_trouble, log_writer, log_lag_bytes, log_appended,
                                   log_holes, log_read, log_reading)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(EngineStreamCounters, batches, duplicates, gaps, gaps_unrepaired, restarts, replays,
                                   losses)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(EngineBatchCounters, events, events_unknown, events_malformed, batches_malformed,
                                   clears)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(EngineIndexCounters, blocks_stored, blocks_removed, blocks_dropped, blocks_unplaced,
                                   other_group, other_block_size, hashes_ambiguous)

namespace {

json counters_json(const EngineStatus& engine) {
  json counters = engine.stream;
  counters.update(json(engine.batches));
  return counters;
}

json engine_json(const EngineStatus& engine) {
  json ranks = json::object();
  for (const auto& [rank, blocks] : engine.blocks) {
    for (std::size_t tier = 0; tier < kNumTiers; ++tier) ranks[std::to_string(rank)][kTierNames[tier]] = blocks[tier];
  }
  return {{"instance_id", engine.info.instance_id},
          {"model", engine.info.model},
          {"tenant", engine.info.tenant},
          {"type", engine.info.kind},
          {"endpoint", engine.info.endpoint},
          {"replay_endpoint", engine.info.replay_endpoint},
          {"block_size", engine.info.block_size},
          {"state", !engine.is_live       ? "lost"
                    : engine.is_connected ? "connected"
                                          : "connecting"},
          {"is_connected", engine.is_connected},
          {"confirmed", engine.is_confirmed},
          {"silent_ms", engine.silent_for / kMillisecond},
          {"blocks", std::move(ranks)},
          {"counters", counters_json(engine)}};
}

/// Returns a short hash of a salt, so that readers of the status can tell salts apart but don't learn them. Returns an
/// empty text for an empty salt.
std::string shown_salt(const std::string& salt) {
  return salt.empty() ? salt : root_key("shown salt", salt).hex().substr(0, 8);
}

json namespace_json(const NamespaceStatus& space) {
  return {{"model", space.model},           {"tenant", space.tenant},     {"salt", shown_salt(space.salt)},
          {"block_size", space.block_size}, {"blocks", space.num_blocks}, {"hashes", space.num_hashes},
          {"counters", space.counters}};
}

void add_details(json& node, const NodeDetails& details) {
  for (const NodeDetail& detail : kNodeDetails) node[std::string(detail.name)] = details.*detail.text;
}

json node_json(const NodeStatus& node, const Flow& flow) {
  json object = {{"namespace", node.name_space},
                 {"engine_id", node.engine_id.value},
                 {"incarnation", node.incarnation.value},
                 {"role", node.role},
                 {"endpoint", node.endpoint},
                 {"chunks", node.num_chunks},
                 {"tails", node.num_tails},
                 {"heartbeat_age_ms", node.heartbeat_age_ms},
                 {"leaving", node.is_leaving},
                 {"drained", node.is_drained},
                 {"to_move", node.num_to_replicate},
                 {"moved", node.num_replicated},
                 {"lost", node.num_lost},
                 {"serves", node.serves},
                 {"load", node.load},
                 {"fingerprint", node.fingerprint},
                 {"version", node.version},
                 {"clock_ahead_ms", node.clock_ahead_ms},
                 {"report", report_json(node, flow)}};
  add_details(object, node.details);
  return object;
}

/// Adds the bytes and failed chunks between each node and its peers, for at most kPairsMax pairs in all, because
/// Prometheus stores a time series for each pair.
void add_transfers(Metrics& metrics, const Status& status) {
  constexpr std::size_t kPairsMax = 1000;
  struct Sum {
    std::uint64_t bytes = 0, num_failed = 0;
  };
  std::map<std::string_view, std::string_view> names;  // [endpoint] engine id
  for (const NodeStatus& node : status.nodes) names[node.endpoint] = node.engine_id.value;
  std::size_t num_pairs = 0;
  for (const NodeStatus& node : status.nodes) {
    if (!node.report) continue;
    std::map<std::pair<std::string_view, bool>, Sum> sums;  // [peer, is_push]
    for (const PathReport& path : node.report->paths) {
      const auto peer = names.find(path.peer);
      Sum& sum = sums[{peer == names.end() ? path.peer : peer->second, path.is_push}];
      sum = {sum.bytes + path.bytes, sum.num_failed + path.num_failed};
    }
    for (const auto& [pair, sum] : sums) {
      if (++num_pairs > kPairsMax) return;
      const Metrics::Labels labels = {{"namespace", node.name_space},
                                      {"node", node.engine_id.value},
                                      {"peer", std::string(pair.first)},
                                      {"direction", pair.second ? "push" : "pull"}};
      metrics.add("transfer_bytes_total", static_cast<double>(sum.bytes), labels);
      metrics.add("transfer_failed_chunks_total", static_cast<double>(sum.num_failed), labels);
    }
  }
}

}  // namespace

json nodes_json(const Status& status) {
  json nodes = json::array();
  for (const NodeStatus& node : status.nodes) {
    nodes.push_back({{"namespace", node.name_space},
                     {"engine_id", node.engine_id.value},
                     {"role", node.role},
                     {"serves", node.serves},
                     {"endpoint", node.endpoint},
                     {"draining", node.is_leaving},
                     {"load", node.load},
                     {"chunks", node.num_chunks},
                     {"fingerprint", node.fingerprint},
                     {"version", node.version}});
    add_details(nodes.back(), node.details);
  }
  return {{"uptime_ms", status.uptime_ms}, {"nodes", std::move(nodes)}};
}

json status_json(const Status& status, const std::string& endpoint) {
  auto flows = flows_of(status);
  json nodes = json::array(), lost = json::array();
  for (const NodeStatus& node : status.nodes) nodes.push_back(node_json(node, flows[node.endpoint]));
  for (const LostNode& one : status.lost) {
    lost.push_back(node_json(one.node, {}));
    lost.back()["lost_ago_ms"] = one.lost_ago_ms;
  }
  return {
      {"controller", endpoint},      {"version", status.version},           {"uptime_ms", status.uptime_ms},
      {"nodes", std::move(nodes)},   {"lost_nodes", std::move(lost)},       {"replica", status.scale},
      {"holds", status.num_pins},    {"held_keys", status.num_pinned_keys}, {"state", status.state},
      {"insecure", status.insecure}, {"refusal", status.refusal},           {"refusal_age_ms", status.refusal_age_ms},
      {"wall_ms", status.wall_ms},   {"counters", status.counters}};
}

json view_json(const ControllerView& view) {
  json all = status_json(view.status, view.endpoint);
  all["engines"] = engines_json(view);
  all["namespaces"] = namespaces_json(view);
  return all;
}

json engines_json(const ControllerView& view) {
  json engines = json::array();
  for (const EngineStatus& engine : view.engines) engines.push_back(engine_json(engine));
  return engines;
}

json namespaces_json(const ControllerView& view) {
  json namespaces = json::array();
  for (const NamespaceStatus& space : view.namespaces) namespaces.push_back(namespace_json(space));
  return namespaces;
}

json replica_json(const ScaleStatus& replica) { return replica; }
json state_json(const StateStatus& state) { return state; }

json workers_json(const ControllerView& view) {
  std::map<std::string, json> endpoints;
  for (const EngineStatus& engine : view.engines)
    endpoints[engine.info.instance_id][std::to_string(engine.info.dp_rank.value_or(0))] = engine.info.endpoint;
  json all = json::array();
  for (auto& [instance, by_rank] : endpoints)
    all.push_back({{"instance_id", instance}, {"endpoints", std::move(by_rank)}});
  return all;
}

std::string metrics_text(const ControllerView& view) {
  Metrics metrics;
  const json counters = view.status.counters;
  metrics.add("up_seconds", static_cast<double>(view.status.uptime_ms) / 1000);
  metrics.add("info", 1, {{"version", view.status.version}});
  for (const auto& [name, value] : counters.items()) metrics.add(name + "_total", value.get<double>());
  metrics.add("nodes", static_cast<double>(view.status.nodes.size()));
  for (const NodeStatus& node : view.status.nodes) {
    const Metrics::Labels labels = {
        {"namespace", node.name_space}, {"node", node.engine_id.value}, {"role", node.role}};
    metrics.add("node_chunks", static_cast<double>(node.num_chunks), labels);
    metrics.add("node_tails", static_cast<double>(node.num_tails), labels);
    metrics.add("node_load", static_cast<double>(node.load), labels);
    metrics.add("node_silent_seconds", static_cast<double>(node.heartbeat_age_ms) / 1000, labels);
    Metrics::Labels with_version = labels;
    with_version.emplace_back("version", node.version);
    metrics.add("node_info", 1, with_version);
  }
  add_transfers(metrics, view.status);
  for (const NodeStatus& node : view.status.nodes) {
    if (!node.is_leaving) continue;
    const Metrics::Labels labels = {{"namespace", node.name_space}, {"node", node.engine_id.value}};
    metrics.add("drain_chunks_left", static_cast<double>(node.num_to_replicate), labels);
    metrics.add("drain_chunks_lost", static_cast<double>(node.num_lost), labels);
  }
  metrics.add("pinned_keys", static_cast<double>(view.status.num_pinned_keys));
  metrics.add("held_keys", static_cast<double>(view.status.num_pinned_keys));  // held_keys: old name of pinned_keys
  if (const StateStatus& state = view.status.state; !state.folder.empty()) {
    metrics.add("state_durable", state.durable ? 1 : 0);
    metrics.add("state_log_bytes", static_cast<double>(state.log_bytes));
    metrics.add("state_snapshot_bytes", static_cast<double>(state.snapshot_bytes));
  }
  if (const ScaleStatus& scale = view.status.scale; !scale.name.empty()) {
    metrics.add("replicas", static_cast<double>(scale.replicas.size()));
    if (!scale.etcd.empty()) metrics.add("etcd_up", scale.etcd_ok ? 1 : 0);
    if (!scale.event_log.empty()) metrics.add("event_log_up", scale.log_ok ? 1 : 0);
  }
  metrics.add("engines", static_cast<double>(view.engines.size()));
  metrics.add("engine_messages_malformed_total", static_cast<double>(view.messages_malformed));
  metrics.add("http_refused_total", static_cast<double>(view.http_refused));
  for (const EngineStatus& engine : view.engines) {
    const Metrics::Labels labels = {{"engine", engine.info.instance_id},
                                    {"model", engine.info.model},
                                    {"tenant", engine.info.tenant},
                                    {"endpoint", engine.info.endpoint}};
    metrics.add("engine_live", engine.is_live ? 1 : 0, labels);
    metrics.add("engine_connected", engine.is_connected ? 1 : 0, labels);
    metrics.add("engine_confirmed", engine.is_confirmed ? 1 : 0, labels);
    metrics.add("engine_silent_seconds", static_cast<double>(engine.silent_for) * 1e-9, labels);
    const json of_engine = counters_json(engine);
    for (const auto& [name, value] : of_engine.items())
      metrics.add("engine_" + name + "_total", value.get<double>(), labels);
    for (const auto& [rank, blocks] : engine.blocks) {
      for (std::size_t tier = 0; tier < kNumTiers; ++tier) {
        Metrics::Labels placed = labels;
        placed.emplace_back("dp_rank", std::to_string(rank));
        placed.emplace_back("tier", kTierNames[tier]);
        metrics.add("engine_blocks", static_cast<double>(blocks[tier]), placed);
      }
    }
  }
  for (const NamespaceStatus& space : view.namespaces) {
    const Metrics::Labels labels = {{"model", space.model},
                                    {"tenant", space.tenant},
                                    {"salt", shown_salt(space.salt)},
                                    {"block_size", std::to_string(space.block_size)}};
    metrics.add("index_blocks", static_cast<double>(space.num_blocks), labels);
    metrics.add("index_hashes", static_cast<double>(space.num_hashes), labels);
    const json of_space = space.counters;
    for (const auto& [name, value] : of_space.items())
      metrics.add("index_" + name + "_total", value.get<double>(), labels);
  }
  return metrics.text();
}

}  // namespace kvferry::controller
