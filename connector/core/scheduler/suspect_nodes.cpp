#include "connector/core/scheduler/suspect_nodes.h"

#include <algorithm>

namespace kvferry {

bool SuspectNodes::allows(const std::string& endpoint, TimeNs now) const {
  const auto found = nodes_.find(endpoint);
  return found == nodes_.end() || (found->second.closed_until <= now && found->second.tried_until <= now);
}

void SuspectNodes::asked(const std::string& endpoint, TimeNs now) {
  const auto found = nodes_.find(endpoint);
  if (found != nodes_.end()) found->second.tried_until = now + try_time_;
}

void SuspectNodes::had_nothing(const std::string& endpoint) {
  const auto found = nodes_.find(endpoint);
  if (found != nodes_.end()) found->second.tried_until = 0;
}

TimeNs SuspectNodes::failed(const std::string& endpoint, TimeNs now) {
  Node& node = nodes_[endpoint];
  if (node.closed_until > now) return 0;
  node.pause = std::clamp(2 * node.pause, kPauseMin, kPauseMax);
  node.closed_until = now + node.pause;
  node.tried_until = 0;
  return node.pause;
}

void SuspectNodes::tick(TimeNs now) {
  std::erase_if(nodes_, [&](const auto& entry) { return entry.second.closed_until + kExpiresAfter <= now; });
}

}  // namespace kvferry
