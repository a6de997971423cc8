// The part of Directory that answers simple questions about nodes and chunks, and that sets quotas and values of nodes.
#include <algorithm>

#include "controller/directory/directory.h"

namespace kvferry::controller {
namespace {

std::size_t remaining(std::size_t max, std::size_t used) { return max > used ? max - used : 0; }

}  // namespace

std::optional<NodeId> Directory::find_node(const std::string& name_space, const std::string& engine_id) const {
  const auto home = namespaces_.find(name_space);
  if (home == namespaces_.end()) return std::nullopt;
  const auto node = home->second->nodes.find(engine_id);
  return node == home->second->nodes.end() ? std::nullopt : std::optional(node->second);
}

const Directory::Node* Directory::node(NodeId id) const {
  const auto it = nodes_.find(id);
  return it == nodes_.end() ? nullptr : it->second.get();
}

std::vector<NodeId> Directory::nodes_of(const std::string& name_space) const {
  std::vector<NodeId> nodes;
  if (const auto home = namespaces_.find(name_space); home != namespaces_.end())
    for (const auto& [engine_id, id] : home->second->nodes) nodes.push_back(id);
  return nodes;
}

std::string Directory::fingerprint_of(const std::string& name_space) const {
  const auto home = namespaces_.find(name_space);
  return home == namespaces_.end() || home->second->nodes.empty() ? "" : home->second->fingerprint;
}

std::vector<NodeId> Directory::holders_of(const std::string& name_space, const ChunkKey& key) const {
  std::vector<NodeId> holders;
  const auto home = namespaces_.find(name_space);
  if (home == namespaces_.end()) return holders;
  for (const ChunkTable::HolderIndex index : home->second->table.holders_of(key)) {
    const NodeInfo& info = home->second->by_index.at(index)->info;
    holders.push_back(home->second->nodes.at(info.engine_id.value));
  }
  return holders;
}

std::vector<ChunkEntry> Directory::entries_of(NodeId id, std::span<const ChunkKey> keys) const {
  std::vector<ChunkEntry> entries;
  const Node* holder = node(id);
  if (holder == nullptr) return entries;
  for (const ChunkKey& key : keys)
    if (const auto entry = holder->home->table.find(holder->seen.index, key)) entries.push_back(*entry);
  return entries;
}

void Directory::want_snapshot(NodeId id) {
  if (Node* node = find(id)) node->owes_snapshot = true;
}

void Directory::set_leaving(NodeId id, bool is_leaving) {
  if (Node* node = find(id)) node->is_leaving = is_leaving;
  ++index_version_;
}

void Directory::set_load(NodeId id, std::uint64_t num_requests, TimeNs now) {
  Node* node = find(id);
  if (node == nullptr) return;
  node->load = num_requests;
  node->load_reported_at = now;
}

void Directory::set_clock_ahead(NodeId id, std::int64_t ahead_ms) {
  if (Node* node = find(id)) node->clock_ahead_ms = ahead_ms;
}

void Directory::set_quota(const std::string& name_space, std::optional<std::size_t> chunks_max) {
  if (chunks_max)
    quotas_[name_space] = *chunks_max;
  else
    quotas_.erase(name_space);
}

/// Returns how many new chunks a generation of `node` with `num_held` chunks may take. The limits already count the
/// node's larger generation, so the smaller generation may grow to the size of the larger one.
std::size_t Directory::room_for(const Node& node, std::size_t num_held) const {
  const std::size_t num_free = remaining(node.num_counted, num_held);
  std::size_t room = std::min(remaining(options_.chunks_max, num_chunks_) + num_free,
                              remaining(options_.chunks_per_node_max, num_held));
  if (const auto quota = quotas_.find(node.info.name_space); quota != quotas_.end())
    room = std::min(room, remaining(quota->second, node.home->num_chunks) + num_free);
  return room;
}

}  // namespace kvferry::controller
