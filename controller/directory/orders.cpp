#include "controller/directory/orders.h"

#include <algorithm>
#include <map>
#include <utility>

#include "controller/api/admin_command.h"
#include "controller/protocol/wire.h"

namespace kvferry::controller {
namespace {

constexpr TimeNs kAdvanceEvery = 50 * kMillisecond;
constexpr std::size_t kMovesMax = 1024;  // under way
constexpr std::size_t kKeysPerRuleMax = 65'536;

wire::AdminReply done(const wire::AdminRequest& request, std::string text, std::uint64_t number = 0) {
  return {.token = request.token, .is_done = true, .text = std::move(text), .number = number};
}
wire::AdminReply refused(const wire::AdminRequest& request, std::string text) {
  return {.token = request.token, .is_done = false, .text = std::move(text)};
}

}  // namespace

wire::AdminReply Orders::take(const wire::AdminRequest& request, std::optional<NodeId> asker, TimeNs now) {
  if (request.keys.keys.size() > kKeysPerRuleMax) {
    return refused(request, fmt::format("{} names {} keys; at most {} are allowed", request.verb,
                                        request.keys.keys.size(), kKeysPerRuleMax));
  }
  if (request.verb == "pin") return pin(request, asker, now);
  if (request.verb == "unpin") return unpin(request);
  if (request.verb == "drain") return drain(request, true);
  if (request.verb == "undrain") return drain(request, false);
  if (request.verb == "move") return move(request, now);
  if (request.verb == "clear") return clear(request);
  if (request.verb == "quota") return quota(request);
  return refused(request, fmt::format("there is no rule '{}'; allowed: pin, unpin, drain, undrain, move, clear, quota",
                                      request.verb.substr(0, 64)));
}

wire::AdminReply Orders::pin(const wire::AdminRequest& request, std::optional<NodeId> asker, TimeNs now) {
  const NodeInfo* reader = asker && request.owner.empty() ? directory_.info(*asker) : nullptr;
  const std::string& name_space = reader != nullptr ? reader->name_space : request.name_space;
  const std::string owner = reader != nullptr ? reader_name(*reader) : request.owner;
  // A reader's name begins as no operator's may, or one could end the other's holds.
  if (reader == nullptr && owner.starts_with("node "))
    return refused(request, "an owner's name can't begin with 'node '");
  const auto ttl = static_cast<TimeNs>(std::min<std::uint64_t>(request.ttl_ms, 1'000'000'000)) * kMillisecond;
  const Result<ControllerPinId> hold = holds_.add(name_space, owner, request.keys.keys, now, ttl);
  if (!hold) return refused(request, hold.error().what);
  if (reader != nullptr) readers_[*asker] = owner;
  std::map<NodeId, std::vector<ChunkKey>> by_node;
  std::size_t num_found = 0;
  for (const ChunkKey& key : holds_.find(*hold)->keys) {
    const std::vector<NodeId> holders = directory_.holders_of(name_space, key);
    num_found += holders.empty() ? 0 : 1;
    for (const NodeId node : holders) by_node[node].push_back(key);
  }
  for (const auto& [node, keys] : by_node) keep(node, keys, now);
  return done(request,
              fmt::format("{} of {} chunks are held on {} nodes and kept there", num_found,
                          holds_.find(*hold)->keys.size(), by_node.size()),
              hold->value);
}

wire::AdminReply Orders::unpin(const wire::AdminRequest& request) {
  const ControllerPinId hold{request.number};
  const Result<std::set<NodeId>> asked = holds_.release(hold);
  if (!asked) return refused(request, asked.error().what);
  unkeep(hold, *asked);
  return done(request, fmt::format("hold {} is over", request.number), asked->size());
}

wire::AdminReply Orders::drain(const wire::AdminRequest& request, bool is_to_leave) {
  const Result<NodeId> node = node_of(request.name_space, request.engine_id);
  if (!node) return refused(request, node.error().what);
  directory_.set_leaving(*node, is_to_leave);
  if (!is_to_leave) {
    return drains_.end(*node) ? done(request, fmt::format("node '{}' stays", request.engine_id))
                              : refused(request, fmt::format("node '{}' is not being drained", request.engine_id));
  }
  if (!drains_.begin(*node)) return done(request, fmt::format("node '{}' is being drained already", request.engine_id));
  snapshots_wanted_.push_back(*node);
  return done(request, fmt::format("node '{}' is being drained", request.engine_id));
}

wire::AdminReply Orders::move(const wire::AdminRequest& request, TimeNs now) {
  const Result<NodeId> from = node_of(request.name_space, request.engine_id);
  if (!from) return refused(request, from.error().what);
  const Result<NodeId> to = node_of(request.name_space, request.other_engine_id);
  if (!to) return refused(request, to.error().what);
  if (*from == *to) return refused(request, "a move needs two nodes");
  if (moves_.size() >= kMovesMax) return refused(request, fmt::format("{} moves are under way already", kMovesMax));
  const std::uint64_t ttl_ms = request.ttl_ms == 0 ? 60'000 : request.ttl_ms;
  if (ttl_ms > 3'600'000) return refused(request, fmt::format("a move of {} ms; up to 3600000 are allowed", ttl_ms));
  const std::vector<ChunkEntry> chunks = directory_.entries_of(*from, request.keys.keys);
  if (chunks.empty()) {
    return refused(request,
                   fmt::format("node '{}' holds none of these {} chunks", request.engine_id, request.keys.keys.size()));
  }
  Move move{*from, *to, {}, now + static_cast<TimeNs>(ttl_ms) * kMillisecond};
  for (const ChunkEntry& chunk : chunks) move.keys.push_back(chunk.key);
  bring(*to, *from, chunks, move.deadline - now);
  moves_.push_back(std::move(move));
  return done(request,
              fmt::format("{} of {} chunks go from '{}' to '{}'", chunks.size(), request.keys.keys.size(),
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
  return done(request, fmt::format("{} nodes are asked to forget their chunks", nodes.size()), nodes.size());
}

wire::AdminReply Orders::quota(const wire::AdminRequest& request) {
  constexpr std::size_t kQuotasMax = 4096;
  if (request.name_space.size() > 256) return refused(request, "a namespace's name has at most 256 bytes");
  const bool is_new = !directory_.quotas().contains(request.name_space);
  if (request.number != kNoQuota && is_new && directory_.quotas().size() >= kQuotasMax)
    return refused(request, fmt::format("{} namespaces have a quota already", kQuotasMax));
  directory_.set_quota(request.name_space,
                       request.number == kNoQuota ? std::nullopt : std::optional<std::size_t>(request.number));
  if (request.number == kNoQuota) return done(request, fmt::format("namespace '{}' has no quota", request.name_space));
  return done(request, fmt::format("namespace '{}' keeps at most {} chunks", request.name_space, request.number),
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
    names.push_back(directory_.info(node)->engine_id.value);
  }
  return Error{ErrorCode::kNotFound,
               fmt::format("namespace '{}' has no node '{}'; it has {}", name_space, engine_id.substr(0, 256),
                           names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", ")))};
}

void Orders::published(NodeId node, std::span<const ChunkEntry> chunks, SnapshotMark mark, TimeNs now) {
  drains_.told(node, chunks, mark);
  if (holds_.size() == 0) return;
  std::vector<ChunkKey> keys;
  for (const ChunkEntry& chunk : chunks) keys.push_back(chunk.key);
  keep(node, keys, now);
}

void Orders::gone(NodeId node) {
  drains_.end(node);
  std::erase_if(moves_, [&](const Move& move) { return move.from == node || move.to == node; });
  holds_.forget(node);
  const auto reader = readers_.find(node);
  if (reader == readers_.end()) return;
  for (const auto& [hold, asked] : holds_.release_owner(reader->second)) unkeep(hold, asked);
  readers_.erase(reader);
}

void Orders::advance(TimeNs now) {
  if (now - advanced_at_ < kAdvanceEvery) return;
  advanced_at_ = now;
  holds_.expire(now);
  if (!drains_.empty())
    for (const Drains::Copy& copy : drains_.advance(*this, now)) bring(copy.to, copy.from, copy.chunks, copy.ttl);
  advance_moves(now);
}

/// What has arrived is forgotten where it came from.
void Orders::advance_moves(TimeNs now) {
  std::erase_if(moves_, [&](Move& move) {
    std::vector<ChunkKey> arrived;
    for (const ChunkEntry& chunk : directory_.entries_of(move.to, move.keys)) arrived.push_back(chunk.key);
    if (!arrived.empty()) {
      std::sort(arrived.begin(), arrived.end());
      std::erase_if(move.keys,
                    [&](const ChunkKey& key) { return std::binary_search(arrived.begin(), arrived.end(), key); });
      forget(move.from, std::move(arrived));
    }
    return move.keys.empty() || now >= move.deadline;
  });
}

void Orders::keep(NodeId node, std::span<const ChunkKey> keys, TimeNs now) {
  const NodeInfo* info = directory_.info(node);
  if (info == nullptr) return;
  for (Pins::Wish& wish : holds_.wishes(info->name_space, node, keys, now)) {
    order(node, wire::Pin{.hold = wish.hold.value,
                           .ttl_ms = static_cast<std::uint64_t>(wish.ttl / kMillisecond),
                           .keys = {std::move(wish.keys)}});
  }
}

void Orders::unkeep(ControllerPinId hold, const std::set<NodeId>& nodes) {
  for (const NodeId node : nodes) order(node, wire::Unpin{.hold = hold.value});
}

void Orders::bring(NodeId to, NodeId from, std::span<const ChunkEntry> chunks, TimeNs ttl) {
  const NodeInfo* source = directory_.info(from);
  if (source == nullptr) return;
  wire::Replicate message{.engine_id = source->engine_id.value,
                      .endpoint = source->endpoint,
                      .ttl_ms = static_cast<std::uint64_t>(ttl / kMillisecond)};
  wire::split_entries(chunks, message.full, message.tails);
  order(to, std::move(message));
}

void Orders::forget(NodeId node, std::vector<ChunkKey> keys) { order(node, wire::EvictOrder{.keys = {std::move(keys)}}); }

template <class Message>
void Orders::order(NodeId to, Message message) {
  const NodeInfo* info = directory_.info(to);
  if (info == nullptr) return;
  message.incarnation = info->incarnation.value;
  orders_.push_back({to, encode(message)});
}

Drains::Place Orders::place_of(NodeId leaving, const ChunkKey& key) const {
  const NodeInfo* info = directory_.info(leaving);
  if (info == nullptr) return Drains::Place::kNowhere;
  bool is_there = false;
  for (const NodeId holder : directory_.holders_of(info->name_space, key)) {
    // Two that leave at the same time don't save each other's chunks.
    if (holder != leaving && !directory_.is_leaving(holder)) return Drains::Place::kElsewhere;
    is_there |= holder == leaving;
  }
  return is_there ? Drains::Place::kOnlyThere : Drains::Place::kNowhere;
}

std::vector<NodeId> Orders::targets(NodeId leaving) const {
  const NodeInfo* info = directory_.info(leaving);
  if (info == nullptr) return {};
  std::vector<NodeId> nodes = directory_.nodes_of(info->name_space);
  std::erase_if(nodes, [&](NodeId node) { return node == leaving || directory_.is_leaving(node); });
  std::stable_sort(nodes.begin(), nodes.end(),
                   [&](NodeId a, NodeId b) { return directory_.num_chunks_of(a) < directory_.num_chunks_of(b); });
  return nodes;
}

void Orders::add_to(Status& status) const {
  status.num_holds = holds_.size();
  status.num_held_keys = holds_.num_keys();
  for (NodeStatus& node : status.nodes) {
    const auto id = directory_.find_node(node.name_space, node.engine_id);
    if (!id || !drains_.is_draining(*id)) continue;
    const Drains::Progress progress = drains_.progress(*id);
    node.is_leaving = true;
    node.is_drained = progress.is_done() && directory_.is_confirmed(*id);
    node.num_to_move = progress.num_left;
    node.num_moved = progress.num_moved;
    node.num_lost = progress.num_lost;
  }
}

std::string Orders::reader_name(const NodeInfo& info) {
  return fmt::format("node '{}' of namespace '{}', incarnation {}", info.engine_id, info.name_space, info.incarnation);
}

}  // namespace kvferry::controller
