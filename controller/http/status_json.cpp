#include "controller/http/status_json.h"

#include <utility>

namespace kvferry::controller {

// The keys are the names of the fields.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Counters, lookups, lookup_keys, lookup_hits, chunks_published, chunks_evicted,
                                   chunks_dropped, heartbeats, nodes_registered, nodes_refused, nodes_expired,
                                   nodes_fenced, snapshots_wanted, messages_malformed, messages_unregistered,
                                   replies_dropped, resends_wanted, digests_differed, orders_sent, messages_taken,
                                   messages_sent)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StateStatus, folder, durable, why_not, log_bytes, snapshot_bytes, snapshot_age_ms,
                                   snapshots_written, records_loaded, load_ms)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ReplicaStatus, name, endpoint)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ScaleStatus, name, replicas, name_taken, etcd, etcd_ok, etcd_gone_ms, etcd_trouble,
                                   etcd_owed, event_log, log_ok, log_trouble, log_writer, log_lag_bytes, log_appended,
                                   log_holes, log_read, log_reading)

nlohmann::json nodes_json(const Status& status) {
  nlohmann::json nodes = nlohmann::json::array();
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
  }
  return {{"nodes", std::move(nodes)}};
}

nlohmann::json status_json(const Status& status, const std::string& endpoint) {
  nlohmann::json nodes = nlohmann::json::array();
  for (const NodeStatus& node : status.nodes) {
    nodes.push_back({{"namespace", node.name_space},
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
                     {"version", node.version}});
  }
  return {{"controller", endpoint},
          {"version", status.version},
          {"uptime_ms", status.uptime_ms},
          {"nodes", std::move(nodes)},
          {"replica", status.scale},
          {"holds", status.num_pins},
          {"held_keys", status.num_pinned_keys},
          {"state", status.state},
          {"counters", status.counters}};
}

}  // namespace kvferry::controller
