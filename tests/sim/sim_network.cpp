// Carries out the cores' network actions: late, in any order, to the nodes that are alive at that time.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "schedule_log.h"
#include "sim_world.h"

namespace kvferry::sim {

bool World::is_cut(std::size_t a, std::size_t b) const {
  const auto found = cut_until_.find(std::minmax(a, b));
  return found != cut_until_.end() && found->second > now();
}

/// Returns whether a firewall between two nodes drops the bytes of chunks. It lets messages pass.
bool World::is_blocked(std::size_t a, std::size_t b) const {
  const auto found = blocked_until_.find(std::minmax(a, b));
  return is_cut(a, b) || (found != blocked_until_.end() && found->second > now());
}

TimeNs World::delay(std::size_t a, std::size_t b) {
  TimeNs late = dice_.between(0, static_cast<std::uint32_t>(network_.max_delay / 1000)) * TimeNs{1000};
  for (const std::size_t node : {a, b})
    if (node < num_nodes() && nodes_[node].slow_until > now()) late = late * 20 + 50 * kMillisecond;
  return late;
}

void World::send(std::size_t from, std::size_t to, std::function<void()> what) {
  tally_.messages += 1;
  if (is_cut(from, to) || dice_.chance(network_.loses)) {
    tally_.lost += 1;
    return;
  }
  const int times = dice_.chance(network_.doubles) ? 2 : 1;
  tally_.doubled += times == 2;
  for (int i = 0; i < times; ++i) {
    const TimeNs when = now() + delay(from, to);
    TimeNs& last = last_on_link_[{from, to}];
    tally_.reordered += when < last;
    last = std::max(last, when);
    at(when, i + 1 < times ? what : std::move(what));
  }
}

void World::send_to_life(std::size_t from, std::size_t to, std::function<void()> what) {
  send(from, to, [this, to, incarnation = nodes_[to].incarnation, what = std::move(what)] {
    if (nodes_[to].incarnation == incarnation && nodes_[to].is_up) what();
  });
}

std::optional<std::size_t> World::node_at(const std::string& endpoint) const {
  for (std::size_t i = 0; i < num_nodes(); ++i)
    if (nodes_[i].endpoint == endpoint) return i;
  return std::nullopt;
}

void World::carry_out(std::size_t index) {
  Node& node = nodes_[index];
  std::vector<Action> actions = node.engine->take_actions();
  for (std::uint32_t rank = 0; rank < node.engine->workers().size(); ++rank)
    for (const PushedSave& save : node.engine->workers()[rank].take_pushed())
      push_saved(index, rank, {save.push, save.index}, save.chunk, {save.ok, save.checksum, save.is_in_frame});
  grow_saves(index);
  for (const auto& [rank, save] : node.engine->take_unwritten()) {
    tally_.saved_in_frames += 1;
    write_slot(index, rank, save.chunk, save);
  }
  for (const Action& action : actions) {
    carry_out_push(index, action);
    if (const auto* asked = std::get_if<QueryDirectory>(&action)) query(index, *asked);
    if (const auto* wanted = std::get_if<RequestLease>(&action)) lease(index, *wanted);
    if (const auto* wanted = std::get_if<StartPull>(&action)) pull(index, *wanted);
    if (const auto* told = std::get_if<GrowPull>(&action)) grow_pull(index, *told);
    if (const auto* released = std::get_if<ReleaseLease>(&action)) release(index, *released);
    if (const auto* line = std::get_if<LogLine>(&action)) {
      node.num_load_lines += line->text.find("to load") != std::string::npos;
      note_suspicion(index, line->paused_node);
      tell("node {} says: {}", index, line->text);
    }
    if (const auto* published = std::get_if<PublishChunks>(&action)) {
      list(index, [chunks = published->chunks](Node& teller) {
        for (const ChunkMeta& chunk : chunks) teller.listed[chunk.key] = chunk;
      });
    } else if (const auto* evicted = std::get_if<AnnounceEvictions>(&action)) {
      mishaps_.to_chunks(&Tally::excused_evicted, index, evicted->keys, now(), now());
      list(index, [keys = evicted->keys](Node& teller) {
        for (const ChunkKey& key : keys) teller.listed.erase(key);
      });
    }
  }
  note_full_pool(index);
  check_pulls(index);
}

/// Sends a node's report to the directory. The reports of a node arrive in order.
void World::list(std::size_t index, std::function<void(Node&)> word) {
  if (num_nodes() == 1) return;
  Node& node = nodes_[index];
  node.last_word = std::max(node.last_word, now() + delay(index, kDirectory));
  at(node.last_word, [this, index, incarnation = node.incarnation, word = std::move(word)] {
    if (nodes_[index].incarnation == incarnation) word(nodes_[index]);
  });
}

std::vector<HolderOffer> World::offers(std::size_t asker, const QueryDirectory& query) {
  const bool is_old = dice_.chance(network_.stale_offers);
  std::vector<HolderOffer> found;
  for (std::size_t i = 0; i < num_nodes(); ++i) {
    const std::map<ChunkKey, ChunkMeta>& listed = is_old ? nodes_[i].listed_before : nodes_[i].listed;
    if (i == asker) continue;
    HolderOffer offer{nodes_[i].endpoint, 0, {}, nodes_[i].member};
    while (offer.num_full_chunks < query.keys.size() && listed.contains(query.keys[offer.num_full_chunks]))
      offer.num_full_chunks += 1;
    if (offer.num_full_chunks < query.tail_groups.size()) {
      for (const auto& [key, chunk] : listed)
        if (chunk.tail_group == query.tail_groups[offer.num_full_chunks]) offer.tails.push_back(chunk);
    }
    if (offer.num_full_chunks > 0 || !offer.tails.empty()) found.push_back(std::move(offer));
  }
  tally_.stale_offers += is_old && !found.empty();
  return found;
}

void World::query(std::size_t node, const QueryDirectory& asked) {
  nodes_[node].last_fetch = asked.fetch;
  tell("node {} asks the directory ({})", node, asked.fetch);
  send_to_life(node, node, [this, node, asked] {
    if (!directory_up_) return;
    send_to_life(node, node, [this, node, fetch = asked.fetch, answer = offers(node, asked)] {
      nodes_[node].engine->core().directory_answered(fetch, answer, now());
    });
  });
}

}  // namespace kvferry::sim
