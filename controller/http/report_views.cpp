#include "controller/http/report_views.h"

namespace kvferry::controller {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PrefixReport, chunk, per_minute)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(NodeReport, num_slots, num_chunks, num_pinned, chunk_bytes, num_pulls, num_pushes,
                                   tokens, local_tokens, loaded_tokens, num_failures, paths, failures, prefixes,
                                   purge_id, num_purged, purged_bytes, weights_epoch)

std::map<std::string, Flow, std::less<>> flows_of(const Status& status) {
  std::map<std::string, Flow, std::less<>> flows;
  for (const NodeStatus& node : status.nodes) {
    if (!is_fresh(node)) continue;
    for (const PathReport& path : node.report->paths) {
      flows[path.is_push ? path.peer : node.endpoint].in_gb_per_s += path.gb_per_s;
      flows[path.is_push ? node.endpoint : path.peer].out_gb_per_s += path.gb_per_s;
    }
  }
  return flows;
}

nlohmann::json report_json(const NodeStatus& node, const Flow& flow) {
  if (!node.report) return nullptr;
  nlohmann::json report = *node.report;
  report["age_ms"] = node.report_age_ms;
  report["is_stale"] = !is_fresh(node);
  report["in_gb_per_s"] = flow.in_gb_per_s;
  report["out_gb_per_s"] = flow.out_gb_per_s;
  return report;
}

}  // namespace kvferry::controller
