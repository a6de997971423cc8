#include "controller/status_json.h"

#include <utility>

namespace kvferry::controller {

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
                     {"lost", node.num_lost}});
  }
  return {{"controller", endpoint},
          {"version", status.version},
          {"uptime_ms", status.uptime_ms},
          {"nodes", std::move(nodes)},
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
            {"orders_sent", counters.orders_sent}}}};
}

}  // namespace kvferry::controller
