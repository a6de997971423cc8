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
      push_saved(index, rank, {save.push, save.index}, save.chunk, {save.ok, save.checksum});
  for (const Action& action : actions) {
    carry_out_push(index, action);
    if (const auto* asked = std::get_if<QueryDirectory>(&action)) query(index, *asked);
    if (const auto* wanted = std::get_if<RequestLease>(&action)) lease(index, *wanted);
    if (const auto* wanted = std::get_if<StartPull>(&action)) pull(index, *wanted);
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

void World::lease(std::size_t node, const RequestLease& wanted) {
  Node& asker = nodes_[node];
  asker.last_fetch = wanted.fetch;
  asker.last_endpoint = wanted.endpoint;
  for (const ChunkKey& key : wanted.request.keys) asker.first_asked.try_emplace(key, wanted.endpoint);
  asker.asked[wanted.fetch] = wanted.request.keys;
  if (asker.forged_answers.contains(wanted.fetch)) note_forged_answer(node, wanted.fetch);
  const std::optional<std::size_t> to = node_at(wanted.endpoint);
  if (!to) return;  // there is no node at this endpoint, but an answer to the request may be forged
  tell("node {} wants {} chunks of node {} ({})", node, wanted.request.keys.size(), *to, wanted.fetch);
  const auto question = new_question(node, wanted.request.keys);
  RequestLease sent = wanted;
  sent.request.shards = shards_of(node);
  sent.request.wants_frames = FrameLeases::has_frames(asker.ranks);
  send_about(*question, node, *to,
             [this, to = *to, sent, question] { answer_lease(to, sent, question, now() + kSavePatience); });
}

/// Answers a lease request. First waits for the saves of chunks that belong to a handoff.
void World::answer_lease(std::size_t to, RequestLease wanted, std::shared_ptr<Question> question, TimeNs deadline) {
  Node& holder = nodes_[to];
  if (!holder.is_up) {
    tally_.crashed_while_down += 1;
    return;
  }
  SchedulerCore& core = holder.engine->core();
  const auto is_being_saved = [&](const ChunkKey& key) {
    const ChunkPool::Slot* slot = core.pool().find(key);
    return slot != nullptr && (is_save(*slot) || slot->ranks_in_frames > 0);
  };
  if (!wanted.request.handoff.empty() && now() < deadline && std::ranges::any_of(wanted.request.keys, is_being_saved)) {
    tally_.leases_after_saves += 1;
    return at(now() + kMillisecond,
              [this, to, wanted, question, deadline] { answer_lease(to, wanted, question, deadline); });
  }
  const LeaseRequest& request = wanted.request;
  LeaseAnswer answer;
  answer.ranks = holder.ranks;
  const bool is_unlike = holder.run_checksums->is_needed(request);
  if (is_unlike && !holder.run_checksums->check(request)) throw Broken("exact-load: a shape that can't be read");
  answer.reply = core.lease_requested(nodes_[question->asker].engine_id.value, request, now());
  PromisesCheck::offered(core, answer.reply, request.keys.size());
  if (answer.reply.lease != 0)
    leases_[{to, answer.reply.lease}] = {holder.incarnation, now() + options_.core.lease_ttl, false};
  const auto send_back = [this, to, wanted, question](const LeaseAnswer& sent) {
    send_about(*question, to, question->asker, [this, wanted, sent, question] {
      Node& reader = nodes_[question->asker];
      if (reader.incarnation != question->incarnation || !reader.is_up) return;
      question->is_answered = true;
      LeaseAnswer got = sent;
      Result<ShardMap> map = fit_answer(reader.ranks, got);
      if (!map) throw Broken("exact-load: " + map.error().what);
      reader.maps[wanted.endpoint] = std::move(*map);
      reader.engine->core().lease_answered(wanted.fetch, wanted.endpoint, got.reply, now());
    });
  };
  const bool has_frames = request.wants_frames && FrameLeases::has_frames(holder.ranks) && !is_unlike;
  if (!is_unlike && (!has_frames || answer.reply.chunks.empty())) return send_back(answer);
  const std::uint64_t id = holder.answers.empty() ? 1 : holder.answers.rbegin()->first + 1;
  holder.answers[id] = send_back;
  if (!is_unlike) return pin_frames(to, id, std::move(answer));
  tally_.unlike_leases += 1;
  for (const auto& order : holder.run_checksums->begin({"", id, 0}, request, std::move(answer), now(), kPatience))
    hash_runs(to, order);
  for (const TimeNs when : {TimeNs{0}, kPatience})
    at(now() + when, [this, to, incarnation = holder.incarnation] {
      if (nodes_[to].incarnation == incarnation && nodes_[to].is_up) tell_hashed(to);
    });
}

/// Pins the frames of leased chunks. Each rank reports them at a time of its own, in time for the answer or not.
void World::pin_frames(std::size_t index, std::uint64_t asker, LeaseAnswer answer) {
  Node& holder = nodes_[index];
  const TimeNs ttl = options_.core.lease_ttl;
  const FramePinOrder order =
      holder.frame_leases.begin({"", asker, 0}, std::move(answer), now(), ttl, now() + kFramePatience);
  for (std::uint32_t rank = 0; rank < holder.ranks.size(); ++rank) {
    FramePinOutcome outcome{order.lease, rank,
                            holder.engine->workers()[rank].frames().pin(order.lease, order.chunks, now() + ttl)};
    tally_.frame_leases += std::ranges::count(outcome.frames, kNoFrame) < std::ssize(outcome.frames);
    at(now() + delay(index, index), [this, index, outcome = std::move(outcome), life = holder.incarnation] {
      if (nodes_[index].incarnation != life) return;
      nodes_[index].frame_leases.take(outcome);
      tell_pinned(index);
    });
  }
  at(now() + kFramePatience, [this, index, life = holder.incarnation] {
    if (nodes_[index].incarnation == life) tell_pinned(index);
  });
}

void World::tell_pinned(std::size_t index) {
  Node& node = nodes_[index];
  for (const FrameLeases::Ready& ready : node.frame_leases.take_ready(now())) {
    const auto answer = node.answers.extract(ready.asker.id);
    answer.mapped()(ready.answer);
  }
}

/// Does what a worker does: hashes each chunk at a time of its own. Some chunks are never hashed.
void World::hash_runs(std::size_t index, const RunChecksums::RankOrder& ranked) {
  const ChecksumOrder& order = ranked.order;
  for (std::uint32_t i = 0; i < order.items.size(); ++i) {
    const bool is_never = dice_.chance(network_.loses / 10);
    const TimeNs late = is_never ? kPatience : delay(index, index);
    if (late >= kPatience - kLongestStep)
      to_chunk(&Tally::excused_unhashed, index, key_in(index, order.items[i].chunk.slot), kPatience);
    if (is_never) continue;
    at(now() + late, [this, index, order, i, incarnation = nodes_[index].incarnation] {
      Node& node = nodes_[index];
      if (node.incarnation != incarnation || !node.is_up) return;
      const Worker& worker = node.engine->workers()[order.rank];
      const std::vector<Stamp> stamps = worker.read_slot(order.items[i].chunk.slot);
      const std::size_t cell = worker.cell_stamps(order.items[i].num_tokens);
      ChecksumOutcome outcome{order.order, order.rank, i, checksum_of(stamps) == order.items[i].checksum, {}};
      for (const ShardRun& run : order.runs) {
        if (outcome.ok)
          outcome.checksums.push_back(checksum_of(std::span(stamps).subspan(run.source * cell, run.cells * cell)));
      }
      node.run_checksums->take(outcome);
      tell_hashed(index);
    });
  }
}

void World::tell_hashed(std::size_t index) {
  Node& node = nodes_[index];
  for (const RunChecksums::Ready& ready : node.run_checksums->take_ready(now())) {
    tally_.unlike_damaged += ready.damaged.size();
    tally_.unlike_late += ready.num_late;
    if (!ready.damaged.empty()) node.engine->core().evict_ordered(ready.damaged);
    const auto answer = node.answers.extract(ready.asker.id);
    answer.mapped()(ready.answer);
  }
}

void World::release(std::size_t node, const ReleaseLease& released) {
  const std::optional<std::size_t> to = node_at(released.endpoint);
  if (!to) return;
  send(node, *to, [this, to = *to, lease = released.lease] {
    if (!nodes_[to].is_up) return;
    nodes_[to].engine->core().lease_released(lease);
    if (nodes_[to].frame_leases.end(lease))
      for (Worker& worker : nodes_[to].engine->workers()) worker.frames().unpin(lease);
    if (const auto found = leases_.find({to, lease}); found != leases_.end()) found->second.is_released = true;
  });
}

}  // namespace kvferry::sim
