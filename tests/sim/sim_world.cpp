#include "sim_world.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace kvferry::sim {

NetworkOptions draw_network(Dice& dice, bool with_faults) {
  NetworkOptions network;
  network.max_delay = dice.pick({1, 20, 100}) * kMillisecond;
  if (!with_faults) return network;
  if (dice.chance(0.3)) network.max_delay = 3 * kSecond;
  network.loses = dice.pick({0.0, 0.05, 0.4});
  network.doubles = dice.pick({0.0, 0.1});
  network.damages_pull = dice.pick({0.0, 0.0, 0.2});
  network.restarts = dice.pick({0.0, 0.003});
  network.directory_dies = dice.pick({0.0, 0.02});
  return network;
}

World::World(const SimOptions& options, const NetworkOptions& network, Dice& dice)
    : options_(options), network_(network), dice_(dice) {
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    nodes_[i].engine_id = EngineId{fmt::format("engine-{}", i)};
    nodes_[i].endpoint = fmt::format("tcp://node-{}:1", i);
    start(i);
  }
}

void World::start(std::size_t index) {
  Node& node = nodes_[index];
  CoreConfig core = options_.core;
  EngineConfig engine = options_.engine;
  if (index == kDecode) {  // the two sides need not agree on the block size
    core.block_tokens = dice_.pick({4u, 8u, 16u});
    engine.num_blocks =
        2 + (engine.num_blocks * options_.core.block_tokens + core.block_tokens - 1) / core.block_tokens;
  }
  node.incarnation += 1;
  core.first_lease = node.incarnation * 1'000'000;
  node.counters = {};
  node.engine = std::make_unique<MiniEngine>(core, engine, book_);
  node.engine->core().set_directory_up(directory_up_);
  node.engine->refuse = [this](const std::string&) {
    deliver();  // the network's thread may come in between any two calls of the engine
    if (!dice_.chance(options_.refuses)) return Refusal::kNone;
    return dice_.chance(0.5) ? Refusal::kSkip : Refusal::kBreak;
  };
}

void World::restart(std::size_t index) {
  Node& node = nodes_[index];
  num_restarts_ += 1;
  std::vector<RequestSpec> again;
  for (const auto& [id, spec] : node.specs)
    if (!node.engine->finished().contains(id)) again.push_back(spec);
  start(index);
  node.specs.clear();
  for (const RequestSpec& spec : again) add(index, spec);
  at(now() + 100 * kMillisecond, [this, index] { nodes_[index].listed.clear(); });  // noticed late
}

void World::add(std::size_t node, const RequestSpec& spec) {
  nodes_[node].specs[spec.id] = spec;
  nodes_[node].engine->add(spec, now());
}

HandoffSource World::source(const std::string& prefill_id, std::uint32_t num_tokens) const {
  return {nodes_[kPrefill].engine_id, nodes_[kPrefill].endpoint, prefill_id, num_tokens};
}

void World::deliver() {
  while (!events_.empty() && events_.begin()->first <= now()) {
    const std::function<void()> what = std::move(events_.begin()->second);
    events_.erase(events_.begin());
    what();
  }
}

void World::send(std::function<void()> what) {
  if (dice_.chance(network_.doubles)) at(now() + delay(), what);
  if (!dice_.chance(network_.loses)) at(now() + delay(), std::move(what));
}

void World::reply(std::size_t to, std::function<void()> what) {
  send([this, to, incarnation = nodes_[to].incarnation, what = std::move(what)] {
    if (nodes_[to].incarnation == incarnation) what();
  });
}

void World::step() {
  clock_.advance(dice_.between(1, 20) * kMillisecond);
  if (dice_.chance(network_.directory_dies)) {
    directory_up_ = !directory_up_;
    for (Node& node : nodes_) node.engine->core().set_directory_up(directory_up_);
  }
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    if (dice_.chance(network_.restarts)) restart(i);
    if (dice_.chance(options_.preempts_all)) nodes_[i].engine->preempt_all();
    if (dice_.chance(options_.resets_cache)) nodes_[i].engine->core().reset_cache();
    if (dice_.chance(options_.orders)) at(now() + delay(), [this, i] { order(i); });
    if (dice_.chance(options_.aborts) && !nodes_[i].specs.empty()) {
      auto spec = nodes_[i].specs.begin();
      std::advance(spec, dice_.raw() % nodes_[i].specs.size());
      nodes_[i].engine->abort(spec->first, now());
    }
    deliver();
    if (dice_.chance(0.9)) nodes_[i].engine->step(now());
    nodes_[i].engine->core().tick(now());
    carry_out(i);
    check_counters(nodes_[i].engine->core().counters(), nodes_[i].counters);
  }
}

/// What a controller may ask at any time, of chunks that somebody has or had.
void World::order(std::size_t index) {
  SchedulerCore& core = nodes_[index].engine->core();
  const std::size_t other = 1 - index;
  std::vector<ChunkMeta> chunks;
  for (const auto& [key, chunk] : nodes_[dice_.chance(0.5) ? index : other].listed)
    if (dice_.chance(0.5)) chunks.push_back(chunk);
  std::vector<ChunkKey> keys;
  for (const ChunkMeta& chunk : chunks) keys.push_back(chunk.key);
  const TimeNs ttl = dice_.between(0, 10) * kSecond;
  const std::uint64_t hold = dice_.between(1, 3);
  switch (dice_.between(0, 4)) {
    case 0:
      return core.keep_ordered({hold, keys, ttl}, now());
    case 1:
      return core.unkeep_ordered(hold);
    case 2:
      return core.forget_ordered(keys);
    case 3:
      return core.reset_cache();
    default:
      return core.fetch_ordered({nodes_[other].engine_id, nodes_[other].endpoint, std::move(chunks), ttl}, now());
  }
}

void World::settle() {
  for (int round = 0; round < 20; ++round) {
    clock_.advance(20 * kSecond);
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      deliver();
      nodes_[i].engine->step(now());
      nodes_[i].engine->core().tick(now());
      carry_out(i);
    }
  }
  for (Node& node : nodes_) check_idle(node.engine->core());
}

void World::carry_out(std::size_t index) {
  Node& node = nodes_[index];
  for (const Action& action : node.engine->take_actions()) {
    if (const auto* asked = std::get_if<DirectoryQuery>(&action)) query(index, *asked);
    if (const auto* wanted = std::get_if<LeaseWanted>(&action)) lease(index, *wanted);
    if (const auto* wanted = std::get_if<PullWanted>(&action)) pull(index, *wanted);
    if (const auto* released = std::get_if<LeaseReleased>(&action)) {
      for (std::size_t to = 0; to < nodes_.size(); ++to)
        if (nodes_[to].endpoint == released->endpoint)
          send([this, to, lease = released->lease] { nodes_[to].engine->core().lease_released(lease); });
    }
    std::function<void()> word;
    if (const auto* published = std::get_if<ChunksPublished>(&action)) {
      word = [&listed = node.listed, chunks = published->chunks] {
        for (const ChunkMeta& chunk : chunks) listed[chunk.key] = chunk;
      };
    } else if (const auto* evicted = std::get_if<ChunksEvicted>(&action)) {
      word = [&listed = node.listed, keys = evicted->keys] {
        for (const ChunkKey& key : keys) listed.erase(key);
      };
    }
    if (!word) continue;
    node.last_word = std::max(node.last_word, now() + delay());
    at(node.last_word, [this, index, incarnation = node.incarnation, word = std::move(word)] {
      if (nodes_[index].incarnation == incarnation) word();
    });
  }
}

std::vector<HolderOffer> World::offers(std::size_t asker, const DirectoryQuery& query) const {
  std::vector<HolderOffer> found;
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    const std::map<ChunkKey, ChunkMeta>& listed = nodes_[i].listed;
    if (i == asker) continue;
    HolderOffer offer{nodes_[i].engine_id, nodes_[i].endpoint, 0, {}};
    while (offer.num_full_chunks < query.keys.size() && listed.contains(query.keys[offer.num_full_chunks]))
      offer.num_full_chunks += 1;
    if (offer.num_full_chunks < query.tail_groups.size()) {
      for (const auto& [key, chunk] : listed)
        if (chunk.tail_group == query.tail_groups[offer.num_full_chunks]) offer.tails.push_back(chunk);
    }
    if (offer.num_full_chunks > 0 || !offer.tails.empty()) found.push_back(std::move(offer));
  }
  return found;
}

void World::query(std::size_t node, const DirectoryQuery& asked) {
  send([this, node, asked, incarnation = nodes_[node].incarnation] {
    if (!directory_up_ || nodes_[node].incarnation != incarnation) return;
    reply(node, [this, node, fetch = asked.fetch, answer = offers(node, asked)] {
      nodes_[node].engine->core().directory_answered(fetch, answer, now());
    });
  });
}

void World::lease(std::size_t node, const LeaseWanted& wanted) {
  for (std::size_t to = 0; to < nodes_.size(); ++to) {
    if (nodes_[to].endpoint != wanted.endpoint) continue;
    send([this, node, to, wanted, incarnation = nodes_[node].incarnation] {
      if (nodes_[node].incarnation != incarnation) return;
      const LeaseReply answer =
          nodes_[to].engine->core().lease_wanted(nodes_[node].engine_id.value, wanted.request, now());
      reply(node, [this, node, wanted, answer] {
        nodes_[node].engine->core().lease_answered(wanted.fetch, wanted.endpoint, answer, now());
      });
    });
  }
}

/// Every rank reads each chunk at a time of its own, whatever lies there then, and answers once, in time or not.
void World::pull(std::size_t node, const PullWanted& wanted) {
  const std::size_t holder = nodes_[0].endpoint == wanted.endpoint ? 0 : 1;
  const auto num_ranks = static_cast<std::uint32_t>(nodes_[node].engine->workers().size());
  for (std::uint32_t rank = 0; rank < num_ranks; ++rank) {
    auto bytes = std::make_shared<std::vector<std::vector<Stamp>>>(wanted.items.size());
    TimeNs done = now();
    for (std::size_t i = 0; i < wanted.items.size(); ++i) {
      const TimeNs when = now() + delay();
      done = std::max(done, when);
      if (when >= wanted.deadline) continue;
      at(when,
         [this, holder, rank, i, bytes, slot = wanted.items[i].remote.slot, incarnation = nodes_[holder].incarnation] {
           if (nodes_[holder].incarnation != incarnation) return;  // its memory is gone
           (*bytes)[i] = nodes_[holder].engine->workers()[rank].read_slot(slot);
           if (dice_.chance(network_.damages_pull) && !(*bytes)[i].empty()) (*bytes)[i].back() ^= 1;
         });
    }
    at(std::min(done, wanted.deadline) + delay(),
       [this, node, rank, bytes, wanted, incarnation = nodes_[node].incarnation] {
         if (nodes_[node].incarnation != incarnation) return;
         std::vector<bool> ok;
         for (std::size_t i = 0; i < wanted.items.size(); ++i)
           ok.push_back(nodes_[node].engine->workers()[rank].write_pulled(wanted.items[i], (*bytes)[i]));
         nodes_[node].engine->core().pull_done(wanted.pull, rank, ok, now());
       });
  }
}

}  // namespace kvferry::sim
