#include "controller/http/status_json.h"

#include <utility>

namespace kvferry::controller {

namespace {

nlohmann::json scale_json(const ScaleStatus& scale) {
  nlohmann::json replicas = nlohmann::json::array();
  for (const ReplicaStatus& replica : scale.replicas)
    replicas.push_back({{"name", replica.name}, {"endpoint", replica.endpoint}});
  return {{"name", scale.name},
          {"replicas", std::move(replicas)},
          {"name_taken", scale.name_taken},
          {"etcd", scale.etcd},
          {"etcd_ok", scale.etcd_ok},
          {"etcd_gone_ms", scale.etcd_gone_ms},
          {"etcd_trouble", scale.etcd_trouble},
          {"etcd_owed", scale.etcd_owed},
          {"event_log", scale.event_log},
          {"log_ok", scale.log_ok},
          {"log_trouble", scale.log_trouble},
          {"log_writer", scale.log_writer},
          {"log_lag_bytes", scale.log_lag_bytes},
          {"log_appended", scale.log_appended},
          {"log_holes", scale.log_holes},
          {"log_read", scale.log_read},
          {"log_reading", scale.log_reading}};
}

}  // namespace

nlohmann::json nodes_json(const Status& status) {
  nlohmann::json nodes = nlohmann::json::array();
  for (const NodeStatus& node : status.nodes) {
    nodes.push_back({{"namespace", node.name_space},
                     {"engine_id", node.engine_id},
                     {"role", node.role},
                     {"serves", node.serves},
                     {"endpoint", node.endpoint},
                     {"draining", node.is_leaving},
                     {"load", node.load},
                     {"chunks", node.num_chunks},
                     {"fingerprint", node.fingerprint},
                     {"version", node.version}});
  }
  return {{"nodes", std::move(nodes)}};
}

nlohmann::json status_json(const Status& status, const std::string& endpoint) {
  const Counters& counters = status.counters;
  nlohmann::json nodes = nlohmann::json::array();
  for (const NodeStatus& node : status.nodes) {
    nodes.push_back({{"namespace", node.name_space},
                     {"engine_id", node.engine_id},
                     {"incarnation", node.incarnation},
                     {"role", node.role},
                     {"endpoint", node.endpoint},
                     {"chunks", node.num_chunks},
                     {"tails", node.num_tails},
                     {"heartbeat_age_ms", node.heartbeat_age_ms},
                     {"leaving", node.is_leaving},
                     {"drained", node.is_drained},
                     {"to_move", node.num_to_move},
                     {"moved", node.num_moved},
                     {"lost", node.num_lost},
                     {"serves", node.serves},
                     {"load", node.load},
                     {"fingerprint", node.fingerprint},
                     {"version", node.version}});
  }
  return {{"controller", endpoint},
          {"version", status.version},
          {"uptime_ms", status.uptime_ms},
          {"nodes", std::move(nodes)},
          {"replica", scale_json(status.scale)},
          {"holds", status.num_holds},
          {"held_keys", status.num_held_keys},
          {"state",
           {{"folder", status.state.folder},
            {"durable", status.state.durable},
            {"why_not", status.state.why_not},
            {"log_bytes", status.state.log_bytes},
            {"snapshot_bytes", status.state.snapshot_bytes},
            {"snapshot_age_ms", status.state.snapshot_age_ms},
            {"snapshots_written", status.state.snapshots_written},
            {"records_loaded", status.state.records_loaded},
            {"load_ms", status.state.load_ms}}},
          {"counters",
           {{"lookups", counters.lookups},
            {"lookup_keys", counters.lookup_keys},
            {"lookup_hits", counters.lookup_hits},
            {"chunks_published", counters.chunks_published},
            {"chunks_evicted", counters.chunks_evicted},
            {"chunks_dropped", counters.chunks_dropped},
            {"heartbeats", counters.heartbeats},
            {"nodes_registered", counters.nodes_registered},
            {"nodes_refused", counters.nodes_refused},
            {"nodes_expired", counters.nodes_expired},
            {"nodes_fenced", counters.nodes_fenced},
            {"snapshots_wanted", counters.snapshots_wanted},
            {"messages_malformed", counters.messages_malformed},
            {"messages_unregistered", counters.messages_unregistered},
            {"replies_dropped", counters.replies_dropped},
            {"resends_wanted", counters.resends_wanted},
            {"digests_differed", counters.digests_differed},
            {"orders_sent", counters.orders_sent},
            {"messages_taken", counters.messages_taken},
            {"messages_sent", counters.messages_sent}}}};
}

}  // namespace kvferry::controller
