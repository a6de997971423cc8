// Pulls in the simulated network: reads of other nodes' slots at any moment, damage on the way, each rank's outcome.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "schedule_log.h"
#include "sim_world.h"

namespace kvferry::sim {

/// Lets every rank of the node read each chunk, or each run of a chunk, at a time of its own, whatever the slot
/// contains then. Each rank answers once, in time or not.
void World::pull(std::size_t node, const StartPull& wanted) {
  Node& reader = nodes_[node];
  const auto num_ranks = static_cast<std::uint32_t>(reader.ranks.size());
  const bool is_new = reader.pulls.emplace(wanted.pull, PullUnderWay{wanted, num_ranks, false, {}}).second;
  if (!is_new) throw Broken(fmt::format("exactly-once: pull {} is asked for twice", wanted.pull));
  if (wanted.lease >= kForgedLease && wanted.lease - kForgedLease <= std::numeric_limits<std::uint32_t>::max())
    throw Broken(fmt::format("verified-only: pull {} is of a node that was not asked", wanted.pull));
  if (wanted.deadline <= now() || wanted.deadline > now() + options_.core.pull_timeout)
    throw Broken(
        fmt::format("bounded-hold: pull {} ends in {} ms", wanted.pull, (wanted.deadline - now()) / kMillisecond));
  const auto is_ordered = [&](const StartPull& pull) {
    return reader.engine->core().pool().slot(pull.items.at(0).local.slot).writer == "a replication";
  };
  if (std::ranges::count_if(reader.pulls, [&](const auto& pull) { return is_ordered(pull.second.wanted); }) > 1)
    throw Broken("bounded-hold: two pieces of what the controller has ordered are pulled at once");
  for (const PullItem& item : wanted.items)
    if (item.num_tokens > options_.core.chunk_tokens)
      throw Broken(fmt::format("verified-only: pull {} brings {} tokens into a slot", wanted.pull, item.num_tokens));
  tell("node {} pulls {} chunks from {} (pull {})", node, wanted.items.size(), wanted.endpoint, wanted.pull);
  const std::size_t holder = node_at(wanted.endpoint).value_or(node);
  for (const PullItem& item : wanted.items) reader.brought_by[item.local] = holder;
  const auto [map, is_misled] = reader.holders[wanted.endpoint];
  for (const PullItem& item : wanted.items)
    if (is_misled) to_chunk(&Tally::excused_parts, node, key_in(node, item.local.slot), wanted.deadline - now());
  for (std::uint32_t rank = 0; rank < num_ranks; ++rank) {
    const auto here = std::make_shared<RankPull>();
    here->wanted = wanted;
    here->map = map;
    here->is_misled = is_misled;
    here->holder_life = nodes_[holder].incarnation;
    here->began = here->grown_at = now();
    StartPull& mine = here->wanted;
    if (options_.num_frames > 0 && dice_.chance(options_.core.pushes_layers ? 0.03 : 0.1))
      here->num_past_frames = pull_past_frames(node, rank, mine);
    reader.pulls.at(wanted.pull).ranks.push_back(here);
    here->bytes.resize(wanted.items.size());
    here->runs_here.resize(wanted.items.size(), 0);
    TimeNs done = now();
    for (std::size_t i = 0; i < wanted.items.size(); ++i) {
      const PullItem& item = wanted.items[i];
      if (item.is_growing) {
        begin_growth(node, rank, *here, i);
        continue;
      }
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
        at(when, [this, node, holder, rank, i, here, &mine, is_run = !map.empty(), run = runs[r],
                  checksum = checksums[r], incarnation = nodes_[holder].incarnation, life = reader.incarnation] {
          // The reader has died since, and its successor may have another shape.
          if (nodes_[node].incarnation != life) return;
          if (is_blocked(node, holder))
            to_chunk(&Tally::excused_blocked, node, key_in(node, mine.items[i].local.slot), mine.deadline - now());
          if (nodes_[holder].incarnation != incarnation || is_blocked(node, holder)) return;
          const auto got =
              read_run(node, holder, is_run ? run.holder : rank, is_run ? &run : nullptr, mine, i, checksum);
          if (!got) return;
          here->runs_here[i] += 1;
          std::vector<Stamp>& bytes = here->bytes[i];
          const Worker& worker = nodes_[node].engine->workers()[rank];
          const std::uint32_t num_tokens = mine.items[i].num_tokens;
          const std::size_t at = run.target * worker.run_stamps(num_tokens);
          const std::size_t size = worker.has_parts() && is_run ? worker.chunk_stamps(num_tokens) : 0;  // with its gaps
          bytes.resize(std::max({bytes.size(), at + got->size(), size}));
          std::copy(got->begin(), got->end(), bytes.begin() + static_cast<std::ptrdiff_t>(at));
        });
      }
    }
    done = std::min(done, wanted.deadline) + delay(node, node);
    const Mishaps::Kind kind = done < wanted.deadline ? &Tally::excused_time_over : &Tally::excused_late;
    for (const PullItem& item : wanted.items) to_chunk(kind, node, key_in(node, item.local.slot), done - now());
    at_in_life(done, node, [this, node, rank, here] { part_ended(node, rank, *here); });
    if (here->parts_left > 1) watch_growth(node, rank, here);
  }
}

/// Makes a rank find no path to the holder's frames, so that it reads slots. Returns the number of chunks that the
/// holder has in a frame.
std::uint32_t World::pull_past_frames(std::size_t node, std::uint32_t rank, StartPull& wanted) {
  std::uint32_t num_past_frames = 0;
  for (PullItem& item : wanted.items) {
    if (rank >= item.frames.size() || item.frames[rank] == kNoFrame) continue;
    num_past_frames += 1;
    item.frames[rank] = kNoFrame;
    if (!item.lacks_slots) continue;
    tally_.lacked_slots += 1;
    to_chunk(&Tally::excused_in_frame, node, key_in(node, item.local.slot), wanted.deadline - now());
  }
  return num_past_frames;
}

/// Checks what a rank finds when it reads a leased chunk, in the frame or, with kNoFrame, in the slot. Returns true if
/// a lease still holds the chunk.
bool World::check_read(std::size_t node, std::size_t holder, const Worker& worker, const StartPull& wanted,
                       ChunkRef remote, std::uint32_t frame) {
  const auto lease = leases_.find({holder, wanted.lease});
  const bool is_leased = lease != leases_.end() && lease->second.incarnation == nodes_[holder].incarnation &&
                         !lease->second.is_released && now() < lease->second.deadline;
  tally_.unleased_reads += !is_leased;
  if (is_leased && worker.generation(remote.slot) != remote.generation)
    throw Broken(fmt::format("fenced-reuse: slot {} of node {} is reused while node {} reads it under lease {}",
                             remote.slot, holder, node, wanted.lease));
  if (is_leased && frame == kNoFrame && worker.is_in_frame_only(remote.slot))
    throw Broken(fmt::format("verified-only: slot {} of node {} is leased, but its chunk is in a frame only",
                             remote.slot, holder));
  if (is_leased && frame != kNoFrame && !worker.frames().holds(frame, remote))
    throw Broken(fmt::format("fenced-reuse: frame {} of node {} is reused while node {} reads it under lease {}", frame,
                             holder, node, wanted.lease));
  return is_leased;
}

std::optional<std::vector<Stamp>> World::read_run(std::size_t node, std::size_t holder, std::uint32_t rank,
                                                  const ShardRun* run, const StartPull& wanted, std::size_t item,
                                                  std::uint64_t checksum) {
  const ChunkRef remote = wanted.items[item].remote;
  // The holder has died since, and its successor has fewer ranks.
  if (rank >= nodes_[holder].engine->workers().size()) return std::nullopt;
  const Worker& worker = nodes_[holder].engine->workers()[rank];
  const std::vector<std::uint32_t>& frames = wanted.items[item].frames;
  const std::uint32_t frame = run == nullptr && rank < frames.size() ? frames[rank] : kNoFrame;
  if (frame == kNoFrame && wanted.items[item].lacks_slots) return std::nullopt;
  std::vector<Stamp> bytes = frame == kNoFrame ? worker.read_slot(remote.slot) : worker.frames().read(frame);
  const bool is_leased = check_read(node, holder, worker, wanted, remote, frame);
  if (!is_leased && leases_.contains({holder, wanted.lease}))
    to_chunk(&Tally::excused_late, node, key_in(node, wanted.items[item].local.slot), wanted.deadline - now());
  // A forged reply may name slots that do not exist.
  bool is_damaged = !bytes.empty() && frame == kNoFrame && worker.damaged(remote.slot);
  if (!bytes.empty() && dice_.chance(network_.damages_pull)) {
    bytes[dice_.raw() % bytes.size()] ^= 1;
    tally_.damaged_on_wire += 1;
    is_damaged = true;
  }
  if (is_damaged)
    to_chunk(&Tally::excused_damaged, node, key_in(node, wanted.items[item].local.slot), wanted.deadline - now());
  if (run == nullptr) return bytes;  // the caller compares the checksum of the whole chunk
  const std::size_t unit = worker.run_stamps(wanted.items[item].num_tokens);
  if ((run->source + run->cells) * unit > bytes.size()) return std::nullopt;
  const auto part = std::span(bytes).subspan(run->source * unit, run->cells * unit);
  if (checksum_of(part) != checksum) return std::nullopt;
  return std::vector<Stamp>(part.begin(), part.end());
}

/// Ends a rank's pull with the last of its parts.
void World::part_ended(std::size_t node, std::uint32_t rank, RankPull& here) {
  if (--here.parts_left == 0) pull_ended(node, rank, here);
}

/// Checks and counts what a rank has put together from runs of parts.
void World::parts_pulled(std::size_t node, std::uint32_t rank, std::uint32_t slot, const RankPull& here) {
  nodes_[node].engine->check_put_together(key_in(node, slot), slot, rank);
  const std::size_t holder = node_at(here.wanted.endpoint).value_or(node);
  if (nodes_[holder].incarnation != here.holder_life) return;
  const auto own = [&](std::size_t of) { return nodes_[of].ranks[0].parts.parts[1][0].bytes; };
  tally_.states_joined += own(node) > own(holder);
  tally_.states_split += own(node) < own(holder);
}

void World::pull_ended(std::size_t node, std::uint32_t rank, const RankPull& here) {
  const StartPull& wanted = here.wanted;
  const ShardMap& map = here.map;
  Node& reader = nodes_[node];
  Worker& worker = reader.engine->workers()[rank];
  std::vector<bool> ok, in_frames;
  TransferEnd end;
  end.num_past_frames = here.num_past_frames;
  std::vector<std::uint64_t> checksums;
  for (std::size_t i = 0; i < wanted.items.size(); ++i) {
    const PullItem& item = wanted.items[i];
    const auto growth = here.growths.find(i);
    if (growth != here.growths.end()) {
      ok.push_back(growth->second.is_whole);
    } else if (map.empty() && !item.checksums.empty()) {
      ok.push_back(worker.write_pulled(item, here.bytes[i]));
    } else {
      checksums.resize(i, 0);
      checksums.push_back(worker.write_runs(item, here.bytes[i]));
      ok.push_back(!map.empty() && here.runs_here[i] == map[rank].size());
      tally_.unlike_pulls += ok.back();
      tally_.misled += here.is_misled && !ok.back();
      if (ok.back() && worker.has_parts()) parts_pulled(node, rank, item.local.slot, here);
    }
    const bool is_from_frame = map.empty() && rank < item.frames.size() && item.frames[rank] != kNoFrame;
    end.num_in_frames += is_from_frame;
    in_frames.push_back(is_from_frame && ok.back() &&
                        (growth != here.growths.end() || worker.move_to_frame(item.local, item.checksums.at(rank))));
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
  reader.engine->core().pull_done(wanted.pull, rank, ok, now(), checksums, end, in_frames);
  reader.engine->check_published();
  for (std::size_t i = 0; i < in_frames.size(); ++i) {
    tally_.in_frames += in_frames[i];
    if (in_frames[i]) write_slot(node, rank, wanted.items[i].local);
  }
}

/// Copies a pulled chunk, or that of a save, from its frame to its slot, at a time of its own. Some copies fail.
void World::write_slot(std::size_t index, std::uint32_t rank, ChunkRef chunk, std::optional<SaveDone> save) {
  const TimeNs late = delay(index, index) * (network_.copies_slowly ? 10 : 1);
  if (dice_.chance(0.1)) {  // any node may ask for a chunk that nobody has published
    SchedulerCore& core = nodes_[index].engine->core();
    const LeaseRequest request{options_.core.fingerprint, {key_in(index, chunk.slot)}, ""};
    PromisesCheck::offered(core, core.lease_requested("", request, now()), request);
    tally_.asked_in_frames += 1;
  }
  const auto growth = nodes_[index].growth_began.find(chunk);
  const TimeNs grew_from = growth == nodes_[index].growth_began.end() ? now() : growth->second;
  if (now() + late - grew_from >= kSavePatience - kLongestStep)
    mishaps_.to_chunks(&Tally::excused_in_frame, index, std::vector{key_in(index, chunk.slot)}, grew_from,
                       now() + late);
  at(now() + late, [this, index, rank, chunk, save, began = now(), life = nodes_[index].incarnation] {
    if (nodes_[index].incarnation != life) return;
    MiniEngine& engine = *nodes_[index].engine;
    const bool ok = !dice_.chance(network_.loses_frames);
    tally_.frames_lost += !ok;
    const ChunkPool::Slot& slot = engine.core().pool().slot(chunk.slot);
    // The core does not announce evictions of chunks that it has not published.
    if (slot.state == ChunkPool::State::kRetired && !slot.write_failed)
      mishaps_.to_chunks(&Tally::excused_evicted, index, {&slot.meta.key, 1}, began, now());
    if (!ok) to_chunk(&Tally::excused_in_frame, index, slot.meta.key);
    tell("node {}, rank {}: slot {} is {} from its frame", index, rank, chunk.slot, ok ? "written" : "not written");
    engine.workers()[rank].slot_written(chunk, ok);
    if (save)
      engine.core().worker_report({rank, 0, {{chunk, ok, save->checksum}}, {}}, now());
    else
      engine.core().slot_written(chunk, rank, ok, now());
    engine.check_published();
  });
}

/// Checks that every chunk that the core counts as being pulled belongs to a pull in progress.
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

/// Checks that nothing is left of what the nodes of purged members brought, under whatever address they did.
void World::check_purged(std::size_t index) {
  Node& node = nodes_[index];
  const SchedulerCore& core = node.engine->core();
  for (auto it = node.brought_by.begin(); it != node.brought_by.end();) {
    const ChunkPool::Slot& slot = core.pool().slot(it->first.slot);
    const bool is_gone = slot.ref != it->first;
    if (!is_gone && slot.state == ChunkPool::State::kReady &&
        core.provenance().is_purged({"member:" + nodes_[it->second].member}))
      throw Broken(
          fmt::format("purged-is-gone: slot {} of node {} has a chunk that node {} brought, whose member was "
                      "purged",
                      slot.ref.slot, index, it->second));
    it = is_gone ? node.brought_by.erase(it) : std::next(it);
  }
}

}  // namespace kvferry::sim
