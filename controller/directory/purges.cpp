#include "controller/directory/purges.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "transport/base/net/members.h"

namespace kvferry::controller {
namespace {

constexpr std::size_t kPurgesMax = 128, kEndpointBytesMax = 512;
constexpr TimeNs kPurgeLasts = 24 * 3600 * kSecond;  // nodes remember a purge for the same time

/// Returns true if the text looks like tcp://HOST:PORT, the form of the endpoints with which nodes register.
bool is_node_endpoint(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  return text.starts_with("tcp://") && colon > 6 && colon + 1 < text.size() && text.size() <= kEndpointBytesMax;
}

}  // namespace

bool Purges::Purge::is_of(const NodeInfo& info) const {
  if (name_space != info.name_space) return false;
  if (!is_of_member()) return giver == info.endpoint;
  return std::string_view(giver).substr(kMemberPrefix.size()) == info.details.member;
}

Result<Purges::Purge> Purges::add(const Directory& directory, const std::string& name_space, const std::string& name,
                                  TimeNs now) {
  Purge purge{0, name_space, name, Incarnation{std::numeric_limits<std::uint64_t>::max()}, now + kPurgeLasts};
  const std::vector<LostNode> lost = directory.lost(now);
  if (purge.is_of_member()) {
    const std::string_view member = std::string_view(name).substr(kMemberPrefix.size());
    if (!net::is_member_name(member))
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("'{}' can't be a member's name; allowed: 1 to 63 letters, digits and dashes",
                               member.substr(0, 256))};
    std::vector<Incarnation> incarnations;
    for (const LostNode& one : lost)
      if (purge.is_of(one.node)) incarnations.push_back(one.node.incarnation);
    for (const NodeId node : directory.nodes_of(name_space))
      if (const NodeInfo& info = directory.node(node)->info; purge.is_of(info))
        incarnations.push_back(info.incarnation);
    if (!incarnations.empty()) purge.incarnation = std::ranges::max(incarnations);
  } else {
    const auto gone = std::ranges::find_if(lost, [&](const LostNode& one) {
      return one.node.engine_id.value == name && one.node.name_space == name_space;
    });
    const auto node = directory.find_node(name_space, name);
    if (node || gone != lost.end()) {
      const NodeInfo& info = node ? directory.node(*node)->info : gone->node;
      purge.giver = info.endpoint;
      purge.incarnation = info.incarnation;
    } else if (!is_node_endpoint(name)) {
      return Error{
          ErrorCode::kNotFound,
          fmt::format("namespace '{}' has no node '{}', and lost no such node in the last ten minutes; to purge "
                      "a node that is gone for longer, give its endpoint, tcp://HOST:PORT, instead of its name",
                      name_space, name.substr(0, 256))};
    }
  }
  std::erase_if(purges_, [&](const Purge& one) {
    return one.ends_at <= now || (one.name_space == name_space && one.giver == purge.giver);
  });
  if (purges_.size() >= kPurgesMax) purges_.erase(purges_.begin());
  // Ids are taken from the clock. Ids that start at 1 in each process of the controller could repeat: then a node's
  // report of an older purge would count as its report of this purge.
  purge.id = last_id_ = std::max(last_id_ + 1, static_cast<std::uint64_t>(now));
  purges_.push_back(purge);
  return purge;
}

std::vector<Purges::Order> Purges::joined(const Directory& directory, NodeId node, TimeNs now) {
  std::vector<Order> orders;
  if (purges_.empty()) return orders;
  const NodeInfo& info = directory.node(node)->info;
  std::erase_if(purges_, [&](const Purge& purge) { return purge.ends_at <= now; });
  for (Purge& purge : purges_) {
    if (purge.name_space != info.name_space) continue;
    const bool is_successor = purge.is_of(info) && info.incarnation > purge.incarnation;
    if (is_successor && !std::exchange(purge.has_successor, true))
      for (const NodeId each : directory.nodes_of(purge.name_space))
        if (each != node) orders.push_back({each, 0, purge.giver});
    // A node that was lost until now may have chunks of the purged process.
    if (!is_successor) orders.push_back({node, purge.id, purge.giver});
    if (purge.has_successor) orders.push_back({node, 0, purge.giver});
  }
  return orders;
}

}  // namespace kvferry::controller
