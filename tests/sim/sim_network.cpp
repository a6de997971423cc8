// Carries out the cores' network actions: late, in any order, to the nodes that are alive at that time.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
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
      note_suspicion(index, line->text);
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

/// Sends news to the directory, in order.
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
    HolderOffer offer{nodes_[i].endpoint, 0, {}};
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
  const std::optional<std::size_t> to = node_at(wanted.endpoint);
  if (!to) return;  // there is no node at this endpoint
  tell("node {} wants {} chunks of node {} ({})", node, wanted.request.keys.size(), *to, wanted.fetch);
  asker.asked[wanted.fetch] = wanted.request.keys;
  if (asker.forged_answers.contains(wanted.fetch)) note_forged_answer(node, wanted.fetch);
  const auto question = new_question(node, wanted.request.keys);
  RequestLease sent = wanted;
  sent.request.shards = shards_of(node);
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
    return slot != nullptr && is_save(*slot);
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
  if (!is_unlike) return send_back(answer);
  tally_.unlike_leases += 1;
  const std::uint64_t id = holder.answers.empty() ? 1 : holder.answers.rbegin()->first + 1;
  holder.answers[id] = send_back;
  for (const auto& order : holder.run_checksums->begin({"", id, 0}, request, std::move(answer), now(), kPatience))
    hash_runs(to, order);
  for (const TimeNs when : {TimeNs{0}, kPatience})
    at(now() + when, [this, to, incarnation = holder.incarnation] {
      if (nodes_[to].incarnation == incarnation && nodes_[to].is_up) tell_hashed(to);
    });
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
    if (const auto found = leases_.find({to, lease}); found != leases_.end()) found->second.is_released = true;
  });
}

/// Every rank reads each chunk, or each run of a chunk, at a time of its own, and gets the bytes that are there at that
/// time. It answers once, in time or too late.
void World::pull(std::size_t node, const StartPull& wanted) {
  Node& reader = nodes_[node];
  const auto num_ranks = static_cast<std::uint32_t>(reader.ranks.size());
  const bool is_new = reader.pulls.emplace(wanted.pull, PullUnderWay{wanted, num_ranks}).second;
  if (!is_new) throw Broken(fmt::format("exactly-once: pull {} is asked for twice", wanted.pull));
  if (wanted.lease >= kForgedLease && wanted.lease - kForgedLease <= std::numeric_limits<std::uint32_t>::max())
    throw Broken(fmt::format("verified-only: pull {} is of a node that was not asked", wanted.pull));
  if (wanted.deadline <= now() || wanted.deadline > now() + options_.core.pull_timeout)
    throw Broken(
        fmt::format("bounded-hold: pull {} ends in {} ms", wanted.pull, (wanted.deadline - now()) / kMillisecond));
  for (const PullItem& item : wanted.items)
    if (item.num_tokens > options_.core.chunk_tokens)
      throw Broken(fmt::format("verified-only: pull {} brings {} tokens into a slot", wanted.pull, item.num_tokens));
  tell("node {} pulls {} chunks from {} (pull {})", node, wanted.items.size(), wanted.endpoint, wanted.pull);
  const std::size_t holder = node_at(wanted.endpoint).value_or(node);
  const ShardMap map = reader.maps[wanted.endpoint];
  for (std::uint32_t rank = 0; rank < num_ranks; ++rank) {
    auto here = std::make_shared<RankPull>();
    here->bytes.resize(wanted.items.size());
    here->runs_here.resize(wanted.items.size(), 0);
    TimeNs done = now();
    for (std::size_t i = 0; i < wanted.items.size(); ++i) {
      const PullItem& item = wanted.items[i];
      const std::vector<ShardRun> runs = map.empty() ? std::vector<ShardRun>(1) : map[rank];
      std::vector<std::uint64_t> checksums(1, 0);
      if (!map.empty()) checksums = rank < item.run_checksums.size() ? item.run_checksums[rank] : checksums;
      for (std::size_t r = 0; r < runs.size(); ++r) {
        const TimeNs when = now() + delay(node, holder);
        done = std::max(done, when);
        if (is_blocked(node, holder)) done = wanted.deadline;
        const Mishaps::Kind kind = is_blocked(node, holder) ? &Tally::excused_blocked : &Tally::excused_late;
        if (done >= wanted.deadline) to_chunk(kind, node, key_in(node, item.local.slot), wanted.deadline - now());
        if (when >= wanted.deadline || holder == node || checksums.size() != runs.size()) continue;
        at(when, [this, node, holder, rank, i, here, wanted, is_run = !map.empty(), run = runs[r],
                  checksum = checksums[r], incarnation = nodes_[holder].incarnation, life = reader.incarnation] {
          // the node that read has restarted meanwhile, perhaps with another shape
          if (nodes_[node].incarnation != life) return;
          if (is_blocked(node, holder))
            to_chunk(&Tally::excused_blocked, node, key_in(node, wanted.items[i].local.slot), wanted.deadline - now());
          if (nodes_[holder].incarnation != incarnation || is_blocked(node, holder)) return;
          const auto got =
              read_run(node, holder, is_run ? run.holder : rank, is_run ? &run : nullptr, wanted, i, checksum);
          if (!got) return;
          here->runs_here[i] += 1;
          std::vector<Stamp>& bytes = here->bytes[i];
          const std::size_t at =
              run.target * nodes_[node].engine->workers()[rank].cell_stamps(wanted.items[i].num_tokens);
          bytes.resize(std::max(bytes.size(), at + got->size()));
          std::copy(got->begin(), got->end(), bytes.begin() + static_cast<std::ptrdiff_t>(at));
        });
      }
    }
    done = std::min(done, wanted.deadline) + delay(node, node);
    const Mishaps::Kind kind = done < wanted.deadline ? &Tally::excused_time_over : &Tally::excused_late;
    for (const PullItem& item : wanted.items) to_chunk(kind, node, key_in(node, item.local.slot), done - now());
    at(done, [this, node, rank, here, map, wanted, incarnation = reader.incarnation] {
      if (nodes_[node].incarnation == incarnation) pull_ended(node, rank, wanted, map, *here);
    });
  }
}

std::optional<std::vector<Stamp>> World::read_run(std::size_t node, std::size_t holder, std::uint32_t rank,
                                                  const ShardRun* run, const StartPull& wanted, std::size_t item,
                                                  std::uint64_t checksum) {
  const ChunkRef remote = wanted.items[item].remote;
  if (rank >= nodes_[holder].engine->workers().size()) return std::nullopt;  // another node is there now
  const Worker& worker = nodes_[holder].engine->workers()[rank];
  std::vector<Stamp> bytes = worker.read_slot(remote.slot);
  const auto lease = leases_.find({holder, wanted.lease});
  const bool is_leased = lease != leases_.end() && lease->second.incarnation == nodes_[holder].incarnation &&
                         !lease->second.is_released && now() < lease->second.deadline;
  tally_.unleased_reads += !is_leased;
  if (is_leased && worker.generation(remote.slot) != remote.generation)
    throw Broken(fmt::format("fenced-reuse: slot {} of node {} is reused while node {} reads it under lease {}",
                             remote.slot, holder, node, wanted.lease));
  // a nonsensical request names a slot that does not exist
  bool is_damaged = !bytes.empty() && worker.damaged(remote.slot);
  if (!bytes.empty() && dice_.chance(network_.damages_pull)) {
    bytes[dice_.raw() % bytes.size()] ^= 1;
    tally_.damaged_on_wire += 1;
    is_damaged = true;
  }
  if (is_damaged)
    to_chunk(&Tally::excused_damaged, node, key_in(node, wanted.items[item].local.slot), wanted.deadline - now());
  if (run == nullptr) return bytes;  // the chunk is judged as a whole
  const std::size_t cell = worker.cell_stamps(wanted.items[item].num_tokens);
  if ((run->source + run->cells) * cell > bytes.size()) return std::nullopt;
  const auto part = std::span(bytes).subspan(run->source * cell, run->cells * cell);
  if (checksum_of(part) != checksum) return std::nullopt;
  return std::vector<Stamp>(part.begin(), part.end());
}

void World::pull_ended(std::size_t node, std::uint32_t rank, const StartPull& wanted, const ShardMap& map,
                       const RankPull& here) {
  Node& reader = nodes_[node];
  Worker& worker = reader.engine->workers()[rank];
  std::vector<bool> ok;
  std::vector<std::uint64_t> checksums;
  for (std::size_t i = 0; i < wanted.items.size(); ++i) {
    const PullItem& item = wanted.items[i];
    if (map.empty() && !item.checksums.empty()) {
      ok.push_back(worker.write_pulled(item, here.bytes[i]));
    } else {
      checksums.resize(i, 0);
      checksums.push_back(worker.write_runs(item, here.bytes[i]));
      ok.push_back(!map.empty() && here.runs_here[i] == map[rank].size());
      tally_.unlike_pulls += ok.back();
    }
    const ChunkKey key = reader.engine->core().pool().slot(item.local.slot).meta.key;
    const auto asked = reader.first_asked.find(key);
    if (!ok.back() || asked == reader.first_asked.end()) continue;
    tally_.other_replica += asked->second != wanted.endpoint;
    reader.first_asked.erase(asked);
  }
  tell("node {}, rank {}: {} of {} chunks of pull {} arrived", node, rank, std::ranges::count(ok, true), ok.size(),
       wanted.pull);
  PullUnderWay& pull = reader.pulls.at(wanted.pull);
  pull.has_failed |= std::ranges::find(ok, true) == ok.end();
  if (--pull.ranks_left == 0) {
    if (const auto holder = node_at(wanted.endpoint); holder && !pull.has_failed) suspected_.erase({node, *holder});
    reader.pulls.erase(wanted.pull);
  }
  reader.engine->core().pull_done(wanted.pull, rank, ok, now(), checksums);
  reader.engine->check_published();
}

/// Checks that every slot that is marked as being pulled is really being pulled.
void World::check_pulls(std::size_t index) const {
  const Node& node = nodes_[index];
  const ChunkPool& pool = node.engine->core().pool();
  if (pool.num_writing() == 0 || num_nodes() == 1) return;
  std::size_t num_items = 0, num_writers = 0;
  for (const auto& [id, pull] : node.pulls) num_items += pull.wanted.items.size();
  for (std::uint32_t i = 0; i < pool.num_slots(); ++i)
    num_writers += pool.slot(i).state == ChunkPool::State::kWriting && !pool.slot(i).writer.starts_with("save of ") &&
                   !pool.slot(i).writer.starts_with("push of ");
  if (num_items != num_writers)
    throw Broken(
        fmt::format("bounded-hold: {} slots wait for a pull, {} chunks are on their way", num_writers, num_items));
}

}  // namespace kvferry::sim
