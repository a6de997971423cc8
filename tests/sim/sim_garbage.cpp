// What a broken or foreign peer or controller may send: no answer to anything, or one with absurd numbers. The core has
// to live on, and to promise nothing on the strength of it.
#include <limits>

#include "sim_world.h"
#include "story.h"

namespace kvferry::sim {

std::uint32_t World::some_number() {
  return dice_.pick({0u, 1u, 3u, 17u, 1u << 20, std::numeric_limits<std::uint32_t>::max() - 1,
                     std::numeric_limits<std::uint32_t>::max()});
}

TimeNs World::some_time() {
  return dice_.pick({TimeNs{-1}, TimeNs{0}, TimeNs{1}, 3 * kSecond, std::numeric_limits<TimeNs>::min(),
                     std::numeric_limits<TimeNs>::max()});
}

/// A key that somebody has, or that nobody ever had.
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
    offer.num_full_chunks = some_number();
    for (std::uint32_t t = dice_.between(0, 3); t > 0; --t)
      offer.tails.push_back({some_key(node), some_number(), dice_.chance(0.5), {}});
  }
  return offers;
}

LeaseReply World::garbage_reply() {
  LeaseReply reply;
  // A number that no holder gives out: what it really leased stays in order.
  reply.lease = dice_.chance(0.3) ? 0 : 1'000'000'000'000ULL + some_number();
  if (dice_.chance(0.2)) reply.refused = "no";
  for (std::uint32_t n = dice_.between(0, 5); n > 0; --n) {
    LeasedChunk& chunk = reply.chunks.emplace_back();
    chunk.index = dice_.chance(0.5) ? dice_.between(0, 3) : some_number();
    chunk.chunk = {some_number(), some_number()};
    chunk.num_tokens = dice_.chance(0.6) ? options_.core.chunk_tokens : some_number();
    if (dice_.chance(0.3)) chunk.window_from = some_number();
    chunk.checksums.resize(dice_.chance(0.7) ? options_.core.num_ranks : dice_.between(0, 9), 7);
    if (dice_.chance(0.7)) continue;
    chunk.checksums.clear();
    chunk.run_checksums.resize(dice_.between(0, 4), std::vector<std::uint64_t>(dice_.between(0, 3), 7));
  }
  return reply;
}

void World::garbage(std::size_t index) {
  Node& node = nodes_[index];
  SchedulerCore& core = node.engine->core();
  tally_.garbage += 1;
  const std::uint64_t fetch = dice_.chance(0.7) ? node.last_fetch + dice_.between(0, 1) : some_number();
  const std::uint32_t kind = dice_.between(0, 7);
  tell("node {} gets garbage of kind {}", index, kind);
  LeaseRequest request{options_.core.fingerprint, {}, dice_.chance(0.5) ? "r0" : ""};
  for (std::uint32_t n = dice_.between(0, 6); n > 0; --n) request.keys.push_back(some_key(index));
  if (!request.keys.empty() && dice_.chance(0.3)) request.keys.push_back(request.keys.front());
  switch (kind) {
    case 0:
      return core.directory_answered(fetch, garbage_offers(), now());
    case 1:
    case 2:
      return core.lease_answered(fetch, dice_.chance(0.8) ? node.last_endpoint : "", garbage_reply(), now());
    case 3:
      if (dice_.chance(0.3)) request.fingerprint = "another model";
      return PromisesCheck::offered(core, core.lease_requested("", request, now()), request.keys.size());
    case 4:
      return core.lease_released(1'000'000'000'000ULL + some_number());
    case 5: {
      const auto id = some_number();  // the draws come in this order
      return core.pin_ordered(id, request.keys, some_time(), now());
    }
    case 6:
      return core.evict_ordered(request.keys);
    default: {
      ReplicateOrder order{dice_.chance(0.5) ? "tcp://nobody:1" : nodes_[other(index)].endpoint, {}, some_time()};
      for (const ChunkKey& key : request.keys) order.chunks.push_back({key, some_number(), dice_.chance(0.5), {}});
      return core.replicate_ordered(std::move(order), now());
    }
  }
}

}  // namespace kvferry::sim
