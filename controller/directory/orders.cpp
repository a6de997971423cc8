#include "controller/directory/orders.h"

#include <algorithm>
#include <map>
#include <utility>

#include "controller/api/admin_command.h"
#include "controller/protocol/wire.h"

namespace kvferry::controller {
namespace {

constexpr TimeNs kAdvanceEvery = 50 * kMillisecond;
constexpr std::size_t kMovesMax = 1024;  // limit on moves in progress
constexpr std::size_t kKeysPerCommandMax = 65'536;

wire::AdminReply done(const wire::AdminRequest& request, std::string text, std::uint64_t number = 0) {
  return {.token = request.token, .is_done = true, .text = std::move(text), .number = number};
}
wire::AdminReply refused(const wire::AdminRequest& request, std::string text) {
  return {.token = request.token, .is_done = false, .text = std::move(text)};
}

/// Returns the text that names a node as the owner of its read leases.
std::string reader_name(const NodeInfo& info) {
  return fmt::format("node '{}' of namespace '{}', incarnation {}", info.engine_id, info.name_space, info.incarnation);
}

}  // namespace

wire::AdminReply Orders::execute(const wire::AdminRequest& request, std::optional<NodeId> asker, TimeNs now) {
  if (request.keys.keys.size() > kKeysPerCommandMax) {
    return refused(request, fmt::format("the command '{}' has {} keys; at most {} are allowed", request.verb,
                                        request.keys.keys.size(), kKeysPerCommandMax));
  }
  if (request.verb == "pin") return pin(request, asker, now);
  if (request.verb == "unpin") return unpin(request);
  if (request.verb == "drain") return drain(request, true);
  if (request.verb == "undrain") return drain(request, false);
  if (request.verb == "move") return move(request, now);
  if (request.verb == "clear") return clear(request);
  if (request.verb == "purge") return purge(request, now);
  if (request.verb == "quota") return quota(request);
  return refused(request,
                 fmt::format("there is no command '{}'; allowed: pin, unpin, drain, undrain, move, clear, purge, quota",
                             request.verb.substr(0, 64)));
}

wire::AdminReply Orders::pin(const wire::AdminRequest& request, std::optional<NodeId> asker, TimeNs now) {
  const Directory::Node* reader = asker && request.owner.empty() ? directory_.node(*asker) : nullptr;
  const std::string& name_space = reader != nullptr ? reader->info.name_space : request.name_space;
  const std::string owner = reader != nullptr ? reader_name(reader->info) : request.owner;
  // An operator must not use a node's name as owner: when that node is removed, the operator's pins would end too.
  if (reader == nullptr && owner.starts_with("node "))
    return refused(request, fmt::format("owner '{}' cannot begin with 'node ', which is reserved for read leases",
                                        owner.substr(0, 64)));
  const Result<ControllerPinId> id = pins_.add(name_space, owner, request.keys.keys, now, request.ttl_ms);
  if (!id) return refused(request, id.error().what);
  if (reader != nullptr) readers_[*asker] = owner;
  std::map<NodeId, std::vector<ChunkKey>> by_node;
  std::size_t num_found = 0;
  for (const ChunkKey& key : pins_.find(*id)->keys) {
    const std::vector<NodeId> holders = directory_.holders_of(name_space, key);
    num_found += holders.empty() ? 0 : 1;
    for (const NodeId node : holders) by_node[node].push_back(key);
  }
  for (const auto& [node, keys] : by_node) order_pins(node, keys, now);
  return done(request,
              fmt::format("{} of {} chunks were found; the {} nodes that have them were ordered to pin them", num_found,
                          pins_.find(*id)->keys.size(), by_node.size()),
              id->value);
}

wire::AdminReply Orders::unpin(const wire::AdminRequest& request) {
  const ControllerPinId id{request.number};
  const Result<std::set<NodeId>> nodes = pins_.release(id);
  if (!nodes) return refused(request, nodes.error().what);
  order_unpin(id, *nodes);
  return done(request, fmt::format("pin {} has ended", request.number), nodes->size());
}

wire::AdminReply Orders::drain(const wire::AdminRequest& request, bool is_to_leave) {
  const Result<NodeId> node = node_of(request.name_space, request.engine_id);
  if (!node) return refused(request, node.error().what);
  directory_.set_leaving(*node, is_to_leave);
  if (!is_to_leave) {
    return drains_.end(*node) ? done(request, fmt::format("the drain of node '{}' is cancelled", request.engine_id))
                              : refused(request, fmt::format("node '{}' is not being drained", request.engine_id));
  }
  if (!drains_.begin(*node)) return done(request, fmt::format("node '{}' is already being drained", request.engine_id));
  snapshots_wanted_.push_back(*node);
  return done(request, fmt::format("node '{}' is being drained", request.engine_id));
}

wire::AdminReply Orders::move(const wire::AdminRequest& request, TimeNs now) {
  const Result<NodeId> from = node_of(request.name_space, request.engine_id);
  if (!from) return refused(request, from.error().what);
  const Result<NodeId> to = node_of(request.name_space, request.other_engine_id);
  if (!to) return refused(request, to.error().what);
  if (*from == *to)
    return refused(request, fmt::format("a move needs a source node and another node as destination; both are '{}'",
                                        request.engine_id));
  if (moves_.size() >= kMovesMax)
    return refused(request,
                   fmt::format("{} moves are already in progress, which is the limit; try again later", kMovesMax));
  const std::uint64_t ttl_ms = request.ttl_ms == 0 ? 60'000 : request.ttl_ms;
  if (ttl_ms > 3'600'000)
    return refused(request, fmt::format("a move can't last {} ms; at most 3600000 are allowed", ttl_ms));
  const std::vector<ChunkEntry> chunks = directory_.entries_of(*from, request.keys.keys);
  if (chunks.empty()) {
    return refused(request,
                   fmt::format("node '{}' holds none of these {} chunks", request.engine_id, request.keys.keys.size()));
  }
  Move move{*from, *to, {}, now + static_cast<TimeNs>(ttl_ms) * kMillisecond};
  for (const ChunkEntry& chunk : chunks) move.keys.push_back(chunk.key);
  order_replication(*to, *from, chunks, move.deadline - now);
  moves_.push_back(std::move(move));
  return done(request,
              fmt::format("{} of {} chunks are being moved from '{}' to '{}'", chunks.size(), request.keys.keys.size(),
                          request.engine_id, request.other_engine_id),
              chunks.size());
}

wire::AdminReply Orders::clear(const wire::AdminRequest& request) {
  std::vector<NodeId> nodes;
  if (!request.engine_id.empty()) {
    const Result<NodeId> node = node_of(request.name_space, request.engine_id);
    if (!node) return refused(request, node.error().what);
    nodes.push_back(*node);
  } else {
    nodes = directory_.nodes_of(request.name_space);
    if (nodes.empty()) return refused(request, fmt::format("namespace '{}' has no nodes", request.name_space));
  }
  for (const NodeId node : nodes) order(node, wire::EvictOrder{.all = true});
  return done(request, fmt::format("{} nodes were ordered to evict their chunks", nodes.size()), nodes.size());
}

wire::AdminReply Orders::purge(const wire::AdminRequest& request, TimeNs now) {
  const std::vector<NodeId> nodes = directory_.nodes_of(request.name_space);
  if (nodes.empty()) return refused(request, fmt::format("namespace '{}' has no nodes", request.name_space));
  const Result<Purges::Purge> purge = purges_.add(directory_, request.name_space, request.engine_id, now);
  if (!purge) return refused(request, purge.error().what);
  for (const NodeId node : nodes) order(node, wire::PurgeOrder{.purge_id = purge->id, .giver = purge->giver});
  const std::string from =
      purge->is_of_member() ? purge->giver : fmt::format("node '{}' at {}", request.engine_id, purge->giver);
  return done(request, fmt::format("{} nodes were ordered to drop the chunks that came from {}", nodes.size(), from),
              purge->id);
}

wire::AdminReply Orders::quota(const wire::AdminRequest& request) {
  constexpr std::size_t kQuotasMax = 4096;
  if (request.name_space.size() > 256)
    return refused(
        request, fmt::format("the namespace's name has {} bytes; at most 256 are allowed", request.name_space.size()));
  const bool is_new = !directory_.quotas().contains(request.name_space);
  if (request.number != kNoQuota && is_new && directory_.quotas().size() >= kQuotasMax)
    return refused(request, fmt::format("{} namespaces already have a quota, which is the limit; remove a quota first",
                                        kQuotasMax));
  directory_.set_quota(request.name_space,
                       request.number == kNoQuota ? std::nullopt : std::optional<std::size_t>(request.number));
  if (request.number == kNoQuota) return done(request, fmt::format("namespace '{}' has no quota", request.name_space));
  return done(request,
              fmt::format("namespace '{}' may have at most {} chunks in the index", request.name_space, request.number),
              request.number);
}

Result<NodeId> Orders::node_of(const std::string& name_space, const std::string& engine_id) const {
  if (const auto node = directory_.find_node(name_space, engine_id)) return *node;
  std::vector<std::string> names;
  for (const NodeId node : directory_.nodes_of(name_space)) {
    if (names.size() == 8) {
      names.push_back("...");
      break;
    }
    names.push_back(directory_.node(node)->info.engine_id.value);
  }
  return Error{ErrorCode::kNotFound,
               fmt::format("namespace '{}' has no node '{}'; it has {}", name_space, engine_id.substr(0, 256),
                           names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", ")))};
}

void Orders::published(NodeId node, std::span<const ChunkEntry> chunks, SnapshotMark mark, TimeNs now) {
  if (drains_.published(node, chunks, mark)) snapshots_wanted_.push_back(node);
  if (pins_.size() == 0) return;
  std::vector<ChunkKey> keys;
  for (const ChunkEntry& chunk : chunks) keys.push_back(chunk.key);
  order_pins(node, keys, now);
}

void Orders::joined(NodeId node, TimeNs now) {
  for (Purges::Order& told : purges_.joined(directory_, node, now))
    order(told.to, wire::PurgeOrder{.purge_id = told.purge_id, .giver = std::move(told.giver)});
}

void Orders::gone(NodeId node) {
  drains_.end(node);
  std::erase_if(moves_, [&](const Move& move) { return move.from == node || move.to == node; });
  pins_.remove(node);
  const auto reader = readers_.find(node);
  if (reader == readers_.end()) return;
  for (const auto& [id, nodes] : pins_.release_owner(reader->second)) order_unpin(id, nodes);
  readers_.erase(reader);
}

void Orders::advance(TimeNs now) {
  if (now - advanced_at_ < kAdvanceEvery) return;
  advanced_at_ = now;
  pins_.expire(now);
  if (!drains_.empty()) {
    for (const Drains::Replication& next : drains_.advance(*this, now))
      order_replication(next.to, next.from, next.chunks, next.ttl);
  }
  advance_moves(now);
}

/// Evicts moved chunks at their source once the destination has them.
void Orders::advance_moves(TimeNs now) {
  std::erase_if(moves_, [&](Move& move) {
    std::vector<ChunkKey> arrived;
    for (const ChunkEntry& chunk : directory_.entries_of(move.to, move.keys)) arrived.push_back(chunk.key);
    if (!arrived.empty()) {
      std::sort(arrived.begin(), arrived.end());
      std::erase_if(move.keys,
                    [&](const ChunkKey& key) { return std::binary_search(arrived.begin(), arrived.end(), key); });
      order(move.from, wire::EvictOrder{.keys = {std::move(arrived)}});
    }
    return move.keys.empty() || now >= move.deadline;
  });
}

void Orders::order_pins(NodeId node, std::span<const ChunkKey> keys, TimeNs now) {
  const Directory::Node* holder = directory_.node(node);
  if (holder == nullptr) return;
  for (Pins::Order& pin : pins_.orders_for(holder->info.name_space, node, keys, now)) {
    order(node, wire::Pin{.pin_id = pin.id.value,
                          .ttl_ms = static_cast<std::uint64_t>(pin.ttl / kMillisecond),
                          .keys = {std::move(pin.keys)}});
  }
}

void Orders::order_unpin(ControllerPinId id, const std::set<NodeId>& nodes) {
  for (const NodeId node : nodes) order(node, wire::Unpin{.pin_id = id.value});
}

void Orders::order_replication(NodeId to, NodeId from, std::span<const ChunkEntry> chunks, TimeNs ttl) {
  const Directory::Node* source = directory_.node(from);
  if (source == nullptr) return;
  wire::Replicate message{.engine_id = source->info.engine_id.value,
                          .endpoint = source->info.endpoint,
                          .ttl_ms = static_cast<std::uint64_t>(ttl / kMillisecond)};
  message.member = source->info.details.member;
  wire::split_entries(chunks, message.full, message.tails);
  order(to, std::move(message));
}

template <class Message>
void Orders::order(NodeId to, Message message) {
  const Directory::Node* node = directory_.node(to);
  if (node == nullptr) return;
  message.incarnation = node->info.incarnation.value;
  orders_.push_back({to, encode(message)});
}

Drains::Place Orders::place_of(NodeId leaving, const ChunkKey& key) const {
  const Directory::Node* node = directory_.node(leaving);
  if (node == nullptr) return Drains::Place::kNowhere;
  bool is_there = false;
  for (const NodeId holder : directory_.holders_of(node->info.name_space, key)) {
    // A copy on another leaving node does not count, because that node may stop too.
    if (holder != leaving && !directory_.node(holder)->is_leaving) return Drains::Place::kElsewhere;
    is_there |= holder == leaving;
  }
  return is_there ? Drains::Place::kOnlyThere : Drains::Place::kNowhere;
}

std::vector<NodeId> Orders::targets(NodeId leaving) const {
  const Directory::Node* node = directory_.node(leaving);
  if (node == nullptr) return {};
  std::vector<NodeId> nodes = directory_.nodes_of(node->info.name_space);
  std::erase_if(nodes, [&](NodeId id) { return id == leaving || directory_.node(id)->is_leaving; });
  std::ranges::stable_sort(nodes, {}, [&](NodeId id) { return directory_.node(id)->num_counted; });
  return nodes;
}

void Orders::add_to(Status& status) const {
  status.num_pins = pins_.size();
  status.num_pinned_keys = pins_.num_keys();
  for (NodeStatus& node : status.nodes) {
    const auto id = directory_.find_node(node.name_space, node.engine_id.value);
    if (!id || !drains_.is_draining(*id)) continue;
    const Drains::Progress progress = drains_.progress(*id);
    node.is_leaving = true;
    node.is_drained = progress.is_done() && directory_.node(*id)->is_confirmed();
    node.num_to_replicate = progress.num_left;
    node.num_replicated = progress.num_replicated;
    node.num_lost = progress.num_lost;
  }
}

}  // namespace kvferry::controller
