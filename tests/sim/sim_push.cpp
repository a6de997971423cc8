// Pushes in the simulated network: offers, reservations, writes into other nodes' slots at any moment, settlements.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "schedule_log.h"
#include "sim_world.h"

namespace kvferry::sim {

void World::carry_out_push(std::size_t node, const Action& action) {
  if (const auto* offered = std::get_if<OfferPush>(&action)) return push_offer(node, *offered);
  if (const auto* granted = std::get_if<GrantSlots>(&action)) return push_grant(node, *granted);
  if (const auto* revoked = std::get_if<RevokeSlots>(&action)) return push_revoke(node, *revoked);
  if (const auto* layers = std::get_if<AnnounceLayers>(&action)) {
    tally_.announced_layers += 1;
    const std::optional<std::size_t> to = node_at(layers->endpoint);
    if (!to) return;
    return send(node, *to, [this, to = *to, progress = layers->progress] {
      if (nodes_[to].is_up) nodes_[to].engine->core().push_progressed(progress, now());
    });
  }
  if (const auto* started = std::get_if<StartPush>(&action)) {
    const PushStart& start = *started;
    for (std::uint32_t rank = 0; rank < nodes_[node].ranks.size(); ++rank)
      push_saved(node, rank, {start.push, start.index}, start.chunk, {true, start.checksums.at(rank)});
  } else if (const auto* settled = std::get_if<SettlePush>(&action)) {
    const std::optional<std::size_t> to = node_at(settled->endpoint);
    if (!to) return;
    send(node, *to, [this, to = *to, settlement = settled->settlement] {
      if (nodes_[to].is_up) nodes_[to].engine->core().push_settled(settlement, now());
    });
  } else if (const auto* dropped = std::get_if<DropPush>(&action)) {
    NodePushes& pushes = nodes_[node].pushes;
    pushes.dropped.insert(dropped->push);
    for (const auto& [key, moving] : pushes.moving)
      if (key.first == dropped->push) push_advance(node, key);
  }
}

std::vector<Shard> World::shards_of(std::size_t node) const {
  std::vector<Shard> shards;
  for (const RankEndpoint& rank : nodes_[node].ranks) shards.push_back(rank.shard);
  return shards;
}

void World::push_offer(std::size_t node, const OfferPush& offered) {
  const std::optional<std::size_t> to = node_at(offered.endpoint);
  if (!to) {
    nodes_[node].engine->core().push_answered(offered.push, offered.endpoint, {}, now());
    return;
  }
  tell("node {} offers {} chunks to node {} (push {})", node, offered.offer.chunks.size(), *to, offered.push);
  PushOffer offer = offered.offer;
  offer.shards = shards_of(node);
  // Some pushes name another address than the node's; no draw, so that seeds keep their schedules.
  if (offered.push % 2 == 0) offer.from = "tcp://hidden:1";
  // Both nodes have frames of GPU memory for some pushes, and for all where layers are announced.
  offer.has_frames = offered.push % 3 == 0 || options_.core.pushes_layers;
  send(node, *to, [this, node, to = *to, push = offered.push, offer = std::move(offer)] {
    if (!nodes_[to].is_up) return;
    if (offer.shards != shards_of(to)) {  // a node of another shape pulls the chunks instead
      tally_.states_declined += options_.has_parts;
      const auto declined = static_cast<std::uint8_t>(PushVerdict::kDeclined);
      return push_answer(to, {node, push, {0, {}, std::vector(offer.chunks.size(), declined)}});
    }
    PushReply reply =
        nodes_[to].engine->core().push_offered(fmt::format("node {}", node), offer, now(), nodes_[node].member, push);
    if (reply.verdicts.size() != offer.chunks.size())
      throw Broken(fmt::format("exact-load: an offer of {} chunks is answered for {}", offer.chunks.size(),
                               reply.verdicts.size()));
    const bool has_slots = std::ranges::count(reply.verdicts, static_cast<std::uint8_t>(PushVerdict::kGranted)) > 0;
    tally_.announced_pushes += reply.reservation != 0 && !has_slots;
    if (has_slots)
      nodes_[to].pushes.pending_grants[reply.reservation] = {node, push, std::move(reply)};
    else
      push_answer(to, {node, push, std::move(reply)});
  });
}

/// The workers grant access to all slots or to some of them. Then the other node gets its answer.
void World::push_grant(std::size_t node, const GrantOrder& order) {
  NodePushes& pushes = nodes_[node].pushes;
  const auto found = pushes.pending_grants.find(order.reservation);
  if (found == pushes.pending_grants.end())
    throw Broken(fmt::format("bounded-hold: no push waits for reservation {}", order.reservation));
  NodePushes::PendingGrant grant = std::move(found->second);
  pushes.pending_grants.erase(found);
  tally_.reservations += 1;
  std::vector<std::uint32_t> missing;
  for (const GrantedChunk& chunk : order.chunks) {
    if (grant.asker != kDirectory) nodes_[node].brought_by[chunk.chunk] = grant.asker;
    for (std::uint32_t rank = 0; rank < nodes_[node].ranks.size(); ++rank)
      pushes.granted[{order.reservation, chunk.index, rank}] = chunk.chunk;
    if (!dice_.chance(network_.fails_grants)) continue;
    missing.push_back(chunk.index);
    grant.reply.verdicts.at(chunk.index) = static_cast<std::uint8_t>(PushVerdict::kDeclined);
  }
  if (!missing.empty()) nodes_[node].engine->core().push_grant_failed(order.reservation, missing);
  push_answer(node, grant);
}

void World::push_answer(std::size_t node, const NodePushes::PendingGrant& grant) {
  const std::size_t asker = grant.asker;
  if (asker == kDirectory) return settle_forged(node, grant.reply);
  send_to_life(node, asker, [this, node, asker, grant, incarnation = nodes_[node].incarnation] {
    nodes_[asker].pushes.orders.try_emplace(grant.push, NodePushes::Order{node, incarnation, grant.reply});
    nodes_[asker].engine->core().push_answered(grant.push, nodes_[node].endpoint, grant.reply, now());
    for (const auto& [key, moving] : nodes_[asker].pushes.moving)
      if (key.first == grant.push) push_advance(asker, key);
  });
}

void World::push_saved(std::size_t node, std::uint32_t rank, NodePushes::Key key, ChunkRef chunk,
                       NodePushes::Saved saved) {
  NodePushes::Moving& moving = nodes_[node].pushes.moving[key];
  moving.saved.resize(nodes_[node].ranks.size());
  moving.is_begun.resize(nodes_[node].ranks.size());
  moving.chunk = chunk;
  if (moving.saved[rank] && (!moving.saved[rank]->is_in_frame || saved.is_in_frame))
    throw Broken(fmt::format("exactly-once: push {} of chunk {} begins twice", key.first, key.second));
  moving.saved[rank] = saved;
  push_advance(node, key);
}

/// Starts the write of every rank that is ready.
void World::push_advance(std::size_t node, NodePushes::Key key) {
  NodePushes& pushes = nodes_[node].pushes;
  NodePushes::Moving& moving = pushes.moving.at(key);
  const auto order = pushes.orders.find(key.first);
  const bool is_dropped = pushes.dropped.contains(key.first);
  for (std::uint32_t rank = 0; rank < nodes_[node].ranks.size(); ++rank) {
    if (!moving.saved[rank] || moving.is_begun[rank]) continue;
    const bool is_ended = is_dropped || !moving.saved[rank]->ok;
    const bool is_in_frame = moving.saved[rank]->is_in_frame;
    if (!is_ended && order == pushes.orders.end()) continue;
    const bool is_wanted = !is_ended && key.second < order->second.reply.verdicts.size() &&
                           order->second.reply.verdicts[key.second] == static_cast<std::uint8_t>(PushVerdict::kGranted);
    if (is_in_frame && (is_wanted || is_ended)) continue;  // until it is in its slot
    moving.is_begun[rank] = true;
    if (!is_wanted) {
      push_ended(node, rank, key, false);
      continue;
    }
    at(now() + delay(node, order->second.to), [this, node, rank, key, incarnation = nodes_[node].incarnation] {
      if (nodes_[node].incarnation == incarnation) push_ended(node, rank, key, push_write(node, rank, key));
    });
  }
}

/// Writes one rank's bytes into the other node's slot, if access to it is still granted.
bool World::push_write(std::size_t node, std::uint32_t rank, NodePushes::Key key) {
  NodePushes& pushes = nodes_[node].pushes;
  if (pushes.dropped.contains(key.first)) return false;
  const NodePushes::Moving& moving = pushes.moving.at(key);
  const NodePushes::Order& order = pushes.orders.at(key.first);
  const Worker& worker = nodes_[node].engine->workers()[rank];
  if (worker.is_in_frame_only(moving.chunk.slot))
    throw Broken(fmt::format("verified-only: slot {} of node {} is pushed, but its chunk is in a frame only",
                             moving.chunk.slot, node));
  if (worker.generation(moving.chunk.slot) != moving.chunk.generation)
    throw Broken(fmt::format("fenced-reuse: slot {} of node {} is reused while it is pushed", moving.chunk.slot, node));
  Node& receiver = nodes_[order.to];
  if (is_blocked(node, order.to) || dice_.chance(network_.loses)) return false;
  if (!receiver.is_up || receiver.incarnation != order.incarnation) return false;
  const auto open = receiver.pushes.granted.find({order.reply.reservation, key.second, rank});
  if (open == receiver.pushes.granted.end()) return false;
  std::vector<Stamp> bytes = worker.read_slot(moving.chunk.slot);
  if (!bytes.empty() && dice_.chance(network_.damages_pull)) {
    bytes[dice_.raw() % bytes.size()] ^= 1;
    tally_.damaged_on_wire += 1;
  }
  receiver.engine->workers()[rank].write_pushed(open->second, bytes);
  tally_.states_pushed += options_.has_parts;
  return checksum_of(bytes) == moving.saved[rank]->checksum;
}

void World::push_ended(std::size_t node, std::uint32_t rank, NodePushes::Key key, bool ok) {
  tell("node {}, rank {}: chunk {} of push {} is {}", node, rank, key.second, key.first,
       ok ? "written" : "not written");
  at(now() + delay(node, node), [this, node, rank, key, ok, incarnation = nodes_[node].incarnation] {
    if (nodes_[node].incarnation != incarnation) return;
    nodes_[node].engine->core().chunk_push_ended({key.first, rank, key.second, ok, {}}, now());
  });
}

/// Each rank revokes its grants at a time of its own. From then on, its slots are not written.
void World::push_revoke(std::size_t node, const Revocation& revocation) {
  for (std::uint32_t rank = 0; rank < nodes_[node].ranks.size(); ++rank) {
    const bool is_stalled = dice_.chance(network_.stalls);
    tally_.stalled += is_stalled;
    const TimeNs late = is_stalled ? dice_.between(1, 20) * kSecond : 0;
    tell("node {}, rank {}: takes {} slots of reservation {} back{}", node, rank, revocation.chunks.size(),
         revocation.reservation, is_stalled ? fmt::format(", {} s late", late / kSecond) : "");
    at(now() + delay(node, node) + late, [this, node, rank, revocation, incarnation = nodes_[node].incarnation] {
      if (nodes_[node].incarnation != incarnation) return;
      Revocation answer = revocation;
      answer.rank = rank;
      const Worker& worker = nodes_[node].engine->workers()[rank];
      for (RevokedChunk& chunk : answer.chunks) {
        if (nodes_[node].pushes.granted.erase({revocation.reservation, chunk.index, rank}) != 1)
          throw Broken(
              fmt::format("exactly-once: reservation {} of chunk {} ends twice", revocation.reservation, chunk.index));
        tally_.reservations_failed += !chunk.ok;
        if (!chunk.ok) continue;
        if (worker.generation(chunk.chunk.slot) != chunk.chunk.generation ||
            worker.slot_checksum(chunk.chunk.slot) != chunk.checksums.at(rank))
          throw Broken(fmt::format("verified-only: slot {} is said to be pushed, and is not", chunk.chunk.slot));
      }
      nodes_[node].engine->core().push_revoked(answer, now());
      nodes_[node].engine->check_published();
    });
  }
}

}  // namespace kvferry::sim
