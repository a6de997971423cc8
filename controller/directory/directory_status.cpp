// The part of Directory that reports on the registered nodes and on the lost ones.
#include <algorithm>

#include "controller/directory/directory.h"

namespace kvferry::controller {
namespace {

constexpr std::size_t kLostMax = 64;
constexpr TimeNs kLostFor = 600 * kSecond;

std::uint64_t ms_since(TimeNs then, TimeNs now) {
  return static_cast<std::uint64_t>(std::max<TimeNs>(0, now - then) / kMillisecond);
}

}  // namespace

std::vector<NodeStatus> Directory::status(TimeNs now) const {
  std::vector<NodeStatus> result;
  result.reserve(nodes_.size());
  for (const auto& [name_space, home] : namespaces_)
    for (const auto& [engine_id, id] : home->nodes) result.push_back(status_of(*nodes_.at(id), now));
  return result;
}

NodeStatus Directory::status_of(const Node& node, TimeNs now) const {
  NodeStatus status{node.info};
  status.num_chunks = node.home->table.num_chunks(node.seen.index);
  status.num_tails = node.home->table.num_tails(node.seen.index);
  status.heartbeat_age_ms = ms_since(node.heard_at, now);
  status.load = node.load;
  status.clock_ahead_ms = node.clock_ahead_ms;
  status.report = node.report;
  status.report_age_ms = ms_since(node.reported_at, now);
  return status;
}

void Directory::set_report(NodeId id, NodeReport report, TimeNs now) {
  Node* node = find(id);
  if (node == nullptr) return;
  node->report = std::make_shared<NodeReport>(std::move(report));
  node->reported_at = now;
}

void Directory::lose(const Node& node, TimeNs now) {
  lost_.push_front({status_of(node, now), now});
  if (lost_.size() > kLostMax) lost_.pop_back();
}

std::vector<LostNode> Directory::lost(TimeNs now) const {
  std::vector<LostNode> result;
  for (const Lost& one : lost_)
    if (now - one.at <= kLostFor) result.push_back({one.status, ms_since(one.at, now)});
  return result;
}

}  // namespace kvferry::controller
