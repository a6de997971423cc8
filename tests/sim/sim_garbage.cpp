// What a broken or malicious peer or controller may send: answers that were not requested, or answers with absurd
// numbers. The core must survive this, and must not promise anything because of it.
#include <limits>

#include "schedule_log.h"
#include "sim_world.h"

namespace kvferry::sim {

std::uint32_t World::some_number() {
  return dice_.pick({0u, 1u, 3u, 17u, 1u << 20, std::numeric_limits<std::uint32_t>::max() - 1,
                     std::numeric_limits<std::uint32_t>::max()});
}

TimeNs World::some_time() {
  return dice_.pick({TimeNs{-1}, TimeNs{0}, TimeNs{1}, 3 * kSecond, std::numeric_limits<TimeNs>::min(),
                     std::numeric_limits<TimeNs>::max()});
}

/// Returns a key that some node has, or that no node ever had.
ChunkKey World::some_key(std::size_t node) {
  const auto& listed = nodes_[node].listed;
  if (!listed.empty() && dice_.chance(0.7)) {
    auto found = listed.begin();
    std::advance(found, dice_.raw() % listed.size());
    return found->first;
  }
  ChunkKey key;
  for (std::uint8_t& byte : key.bytes) byte = static_cast<std::uint8_t>(dice_.raw());
  return key;
}

std::vector<HolderOffer> World::garbage_offers() {
  std::vector<HolderOffer> offers;
  for (std::uint32_t n = dice_.between(0, 4); n > 0; --n) {
    HolderOffer& offer = offers.emplace_back();
    const std::size_t node = dice_.between(0, num_nodes() - 1);
    offer.endpoint = dice_.chance(0.3) ? "" : dice_.chance(0.3) ? "tcp://nobody:1" : nodes_[node].endpoint;
    offer.member = member_at(offer.endpoint);
    offer.num_full_chunks = some_number();
    for (std::uint32_t t = dice_.between(0, 3); t > 0; --t)
      offer.tails.push_back({some_key(node), some_number(), dice_.chance(0.5), {}});
  }
  return offers;
}

LeaseReply World::garbage_reply() {
  LeaseReply reply;
  // No holder grants leases with such high numbers, so that the forged leases can't be taken for real ones.
  reply.lease = dice_.chance(0.3) ? 0 : 1'000'000'000'000ULL + some_number();
  if (dice_.chance(0.2)) reply.refused = "no";
  for (std::uint32_t n = dice_.between(0, 5); n > 0; --n) {
    LeasedChunk& chunk = reply.chunks.emplace_back();
    chunk.index = dice_.chance(0.5) ? dice_.between(0, 3) : some_number();
    chunk.chunk = {some_number(), some_number()};
    chunk.num_tokens = dice_.chance(0.6) ? options_.core.chunk_tokens : some_number();
    if (dice_.chance(0.3)) chunk.window_from = some_number();
    if (dice_.chance(0.1)) chunk.windows_from.assign(dice_.between(0, 4), some_number());
    chunk.checksums.resize(dice_.chance(0.7) ? options_.core.num_ranks : dice_.between(0, options_.core.num_ranks + 1),
                           7);
    if (dice_.chance(0.7)) continue;
    chunk.checksums.clear();
    chunk.run_checksums.resize(dice_.between(0, 4), std::vector<std::uint64_t>(dice_.between(0, 3), 7));
  }
  return reply;
}

/// Offers chunks under keys that some node has, with lengths that do not belong to these keys.
void World::forge_push(std::size_t index) {
  Node& node = nodes_[index];
  PushOffer offer{options_.core.fingerprint, static_cast<std::uint32_t>(node.ranks.size()), {}, {}};
  for (const auto& [key, chunk] : nodes_[dice_.between(0, num_nodes() - 1)].listed) {
    const std::uint32_t length = dice_.between(0, options_.core.chunk_tokens + 1);
    if (length == chunk.num_tokens || !dice_.chance(0.3)) continue;
    if (!forged_.insert(key).second) continue;  // the directory may list the wrong chunk under this key later
    offer.chunks.push_back({key, length, {}});
    // the forged chunk can do harm until it is looked up
    to_chunk(&Tally::excused_forged, index, key, options_.core.order_ttl_max);
  }
  PushReply reply = node.engine->core().push_offered("liar", offer, now());
  if (reply.reservation != 0) node.pushes.pending_grants[reply.reservation] = {kDirectory, 0, std::move(reply)};
}

/// Writes into the granted slots, and settles them with the right checksums.
void World::settle_forged(std::size_t index, const PushReply& reply) {
  Node& node = nodes_[index];
  PushSettlement settlement{reply.reservation, {}};
  for (std::uint32_t i = 0; i < reply.verdicts.size(); ++i) {
    if (reply.verdicts[i] != static_cast<std::uint8_t>(PushVerdict::kGranted)) continue;
    for (std::uint32_t rank = 0; rank < node.ranks.size(); ++rank)
      node.engine->workers()[rank].write_pushed(node.pushes.granted.at({reply.reservation, i, rank}), Worker::forged());
    settlement.chunks.push_back({i, true, 0, std::vector(node.ranks.size(), checksum_of(Worker::forged()))});
  }
  send_to_life(kDirectory, index, [this, index, settlement = std::move(settlement)] {
    nodes_[index].engine->core().push_settled(settlement, now());
  });
}

void World::garbage(std::size_t index) {
  Node& node = nodes_[index];
  SchedulerCore& core = node.engine->core();
  tally_.garbage += 1;
  const std::uint64_t fetch = dice_.chance(0.7) ? node.last_fetch + dice_.between(0, 1) : some_number();
  const std::uint32_t kind = dice_.between(0, 8);
  tell("node {} gets garbage of kind {}", index, kind);
  LeaseRequest request{options_.core.fingerprint, {}, dice_.chance(0.5) ? "r0" : ""};
  for (std::uint32_t n = dice_.between(0, 6); n > 0; --n) request.keys.push_back(some_key(index));
  if (!request.keys.empty() && dice_.chance(0.3)) request.keys.push_back(request.keys.front());
  switch (kind) {
    case 0:
      return core.directory_answered(fetch, garbage_offers(), now());
    case 1:
    case 2: {
      const bool is_asked = dice_.chance(0.8);
      LeaseReply reply = garbage_reply();
      if (!is_asked) reply.lease += kForgedLease;
      if (is_asked) note_forged_answer(index, fetch);
      return core.lease_answered(fetch, is_asked ? node.last_endpoint : "tcp://liar:1", reply, now());
    }
    case 3:
      if (dice_.chance(0.3)) request.fingerprint = "another model";
      return PromisesCheck::offered(core, core.lease_requested("", request, now()), request);
    case 4:
      return core.lease_released(1'000'000'000'000ULL + some_number());
    case 5: {
      const auto id = some_number();  // a variable, because the order of the random draws must not change
      return core.pin_ordered(id, request.keys, some_time(), now());
    }
    case 6:
      return evict(index, request.keys);
    case 7:
      return forge_push(index);
    default: {
      ReplicateOrder order{dice_.chance(0.5) ? "tcp://nobody:1" : nodes_[other(index)].endpoint, {}, some_time()};
      order.member = member_at(order.endpoint);
      for (const ChunkKey& key : request.keys) order.chunks.push_back({key, some_number(), dice_.chance(0.5), {}});
      return core.replicate_ordered(std::move(order), now());
    }
  }
}

}  // namespace kvferry::sim
