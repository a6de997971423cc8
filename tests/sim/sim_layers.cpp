// Chunks that grow in frames of GPU memory: saves that are packed by groups of layers, each at a time of its own, and
// pulls of the groups that were announced.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "schedule_log.h"
#include "sim_world.h"

namespace kvferry::sim {
namespace {

constexpr std::uint32_t kGroups = 3;  // the setting push_layers

}  // namespace

bool World::has_growing(std::size_t index) const {
  return nodes_[index].is_up && std::ranges::any_of(nodes_[index].engine->workers(),
                                                    [](const Worker& worker) { return worker.num_growing() > 0; });
}

// ---- the prefill node ----
void World::grow_saves(std::size_t index) {
  std::vector<Worker>& workers = nodes_[index].engine->workers();
  for (std::uint32_t rank = 0; rank < workers.size(); ++rank)
    for (const SaveItem& save : workers[rank].take_growths()) grow_save(index, rank, save);
}

/// Packs one group of layers after the other, and tells the core of each but the last. Some groups are told before they
/// are packed, and some nodes die meanwhile.
void World::grow_save(std::size_t index, std::uint32_t rank, const SaveItem& save) {
  Worker& worker = nodes_[index].engine->workers()[rank];
  tally_.growing_saves += 1;
  nodes_[index].growth_began.try_emplace(save.chunk, now());
  const TimeNs pace = dice_.pick({1, 50, 200}) * kMillisecond;
  const std::uint32_t num_layers = worker.shard().num_layers;
  TimeNs when = now();
  const auto last = std::make_shared<std::uint32_t>(0);  // what was told last
  for (std::uint32_t layers = 1; layers < num_layers; ++layers) {
    const std::uint32_t done = layers * kGroups / num_layers;
    if (done == (layers - 1) * kGroups / num_layers) continue;
    when += dice_.between(0, 2000) * pace / 1000;
    at_in_life(when, index, [&worker, chunk = save.chunk, layers] { worker.pack(chunk, layers); });
    const bool is_early = dice_.chance(network_.tells_early);
    tally_.layers_told_early += is_early;
    if (is_early) nodes_[index].told_early.insert({rank, save.chunk});
    const LayersSaved told{save.push, rank, {save.push_index}, done, kGroups};
    const TimeNs later = dice_.chance(0.1) ? 2 * pace : TimeNs{0};  // perhaps after the next group
    at_in_life(is_early ? now() : when + later + delay(index, index) / 4, index, [this, index, told, last] {
      tally_.layers_disordered += told.done < std::exchange(*last, told.done);
      nodes_[index].engine->core().layers_saved(told);
    });
  }
  when += dice_.between(0, 2000) * pace / 1000;
  tell("node {}, rank {}: slot {} grows for {} ms", index, rank, save.chunk.slot, (when - now()) / kMillisecond);
  at_in_life(when, index, [&worker, chunk = save.chunk] { worker.end_growth(chunk); });
  // A later step reports the end.
  if (when - now() >= kSavePatience - 4 * kLongestStep)
    to_chunk(&Tally::excused_in_frame, index, key_in(index, save.chunk.slot), when - now());
  if (dice_.chance(network_.crashes * 10))
    at_in_life(now() + (when - now()) * dice_.between(0, 1000) / 1000, index, [this, index] { crash(index); });
}

// ---- the decode node ----
/// Begins the landing of a chunk whose layers are announced, in a frame.
void World::begin_growth(std::size_t node, std::uint32_t rank, RankPull& here, std::size_t index) {
  PullItem& item = here.wanted.items[index];
  RankPull::Growth& growth = here.growths[index];
  growth.key = key_in(node, item.local.slot);
  const bool has_landed = nodes_[node].engine->workers()[rank].begin_landing(item);
  const bool is_there = rank < item.frames.size() && item.frames[rank] != kNoFrame;
  growth.is_open = has_landed && is_there;
  tally_.growth_begun += growth.is_open;
  if (growth.is_open) {
    here.parts_left += 1;
    if (dice_.chance(network_.crashes * 20))
      at_in_life(now() + dice_.between(0, 200) * kMillisecond, node, [this, node] { crash(node); });
    return;
  }
  tally_.growth_without_frame += 1;
  if (has_landed) nodes_[node].engine->workers()[rank].end_landing(item.local, std::nullopt);
  if (!is_there) return;
  item.frames[rank] = kNoFrame;
  here.num_past_frames += 1;
}

/// Tells every rank, at a time of its own, what it may pull.
void World::grow_pull(std::size_t node, const GrowPull& told) {
  const auto found = nodes_[node].pulls.find(told.pull);
  if (found == nodes_[node].pulls.end()) return;
  for (std::uint32_t rank = 0; rank < found->second.ranks.size(); ++rank) {
    const RankPullPtr here = found->second.ranks[rank];
    here->last_word = std::max(here->last_word, now() + delay(node, node) / 4);
    at_in_life(here->last_word, node, [this, node, rank, here, told] { grow(node, rank, here, told); });
  }
}

/// Does what Puller::grow() does.
void World::grow(std::size_t node, std::uint32_t rank, const RankPullPtr& here, const GrowPull& told) {
  const std::uint32_t num_layers = nodes_[node].engine->workers()[rank].shard().num_layers;
  const std::uint32_t end = told.is_settled ? num_layers : layers_of(told.done, told.of, num_layers);
  const bool is_lost = told.is_settled && rank >= told.checksums.size();
  here->grown_at = now();
  for (const std::uint32_t index : told.items) {
    const auto found = here->growths.find(index);
    if (found == here->growths.end() || !found->second.is_open) continue;
    RankPull::Growth& growth = found->second;
    tally_.layers_disordered += end < growth.layers;
    if (growth.ok && !is_lost && growth.layers < end)
      pull_layers(node, rank, here, index, std::exchange(growth.layers, end), end);
    if (!told.is_settled) continue;
    tally_.growth_lost += is_lost;
    if (!is_lost) growth.checksum = told.checksums[rank];
    close_growth(node, rank, here, index, !is_lost);
  }
  watch_growth(node, rank, here);
}

/// Ends the growth of chunks of which nothing is announced for too long, or until the pull's deadline.
void World::watch_growth(std::size_t node, std::uint32_t rank, const RankPullPtr& here) {
  const TimeNs grown_at = here->grown_at;
  at_in_life(std::min(grown_at + kGrowthPause, here->wanted.deadline), node, [this, node, rank, here, grown_at] {
    if (here->grown_at > grown_at && now() < here->wanted.deadline) return;
    for (auto& [index, growth] : here->growths) {
      if (!growth.is_open) continue;
      tally_.growth_paused += 1;
      mishaps_.to_chunks(&Tally::excused_late, node, {&growth.key, 1}, here->began, now());
      close_growth(node, rank, here, index, false);
    }
  });
}

/// Reads layers from the holder's frame at a time of its own, whatever the frame has then.
void World::pull_layers(std::size_t node, std::uint32_t rank, const RankPullPtr& here, std::size_t index,
                        std::uint32_t first, std::uint32_t end) {
  here->growths.at(index).num_pending += 1;
  const std::size_t holder = node_at(here->wanted.endpoint).value_or(node);
  const TimeNs when = now() + delay(node, holder);
  const TimeNs deadline = std::max(here->wanted.deadline, now());
  const bool is_late = when >= deadline || is_blocked(node, holder);
  const Mishaps::Kind kind = is_blocked(node, holder) ? &Tally::excused_blocked : &Tally::excused_late;
  if (is_late) to_chunk(kind, node, here->growths.at(index).key, deadline - now());
  at_in_life(is_late ? deadline : when, node, [this, node, holder, rank, here, index, first, end, is_late] {
    RankPull::Growth& growth = here->growths.at(index);
    if (!is_late && is_blocked(node, holder)) to_chunk(&Tally::excused_blocked, node, growth.key);
    std::optional<std::vector<Stamp>> bytes;
    if (!is_late && !is_blocked(node, holder)) bytes = read_layers(node, holder, rank, *here, index, first, end);
    growth.ok = growth.ok && bytes;
    if (bytes) {
      tally_.layers_pulled += growth.is_open;
      Worker& worker = nodes_[node].engine->workers()[rank];
      const PullItem& item = here->wanted.items[index];
      worker.land(item.local, worker.layers_stamps(first, item.num_tokens), *bytes);
    }
    growth_piece_ended(node, rank, here, index);
  });
}

/// Returns what the holder's frame has of these layers; nullopt if it can't be read.
std::optional<std::vector<Stamp>> World::read_layers(std::size_t node, std::size_t holder, std::uint32_t rank,
                                                     RankPull& here, std::size_t index, std::uint32_t first,
                                                     std::uint32_t end) {
  if (nodes_[holder].incarnation != here.holder_life || holder == node) return std::nullopt;
  const Worker& worker = nodes_[holder].engine->workers().at(rank);
  const PullItem& item = here.wanted.items[index];
  RankPull::Growth& growth = here.growths.at(index);
  const std::uint32_t frame = item.frames.at(rank);
  const std::size_t from = worker.layers_stamps(first, item.num_tokens);
  const std::size_t to = worker.layers_stamps(end, item.num_tokens);
  const bool is_leased = check_read(node, holder, worker, here.wanted, item.remote, frame);
  const bool is_packed = worker.frames().num_filled(frame) >= to;
  if (is_leased && !is_packed && !nodes_[holder].told_early.contains({rank, item.remote}))
    throw Broken(
        fmt::format("verified-only: node {} reads layers {} to {} of a chunk that grows in frame {} of node {}, "
                    "which are not packed yet",
                    node, first, end, frame, holder));
  tally_.layers_read_early += is_leased && !is_packed;
  tally_.layers_unleased += !is_leased;
  if (!is_leased) to_chunk(&Tally::excused_late, node, growth.key);
  std::vector<Stamp> bytes = worker.frames().read(frame);
  bytes.resize(to);
  bytes.erase(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(from));
  bool is_damaged = is_leased && !is_packed;
  if (dice_.chance(network_.damages_pull)) {
    bytes[dice_.raw() % bytes.size()] ^= 1;
    tally_.damaged_on_wire += 1;
    is_damaged = true;
  }
  if (is_damaged) to_chunk(&Tally::excused_damaged, node, growth.key, here.wanted.deadline - now());
  growth.is_tainted |= is_damaged || !is_leased;
  return bytes;
}

void World::close_growth(std::size_t node, std::uint32_t rank, const RankPullPtr& here, std::size_t index, bool ok) {
  RankPull::Growth& growth = here->growths.at(index);
  if (!std::exchange(growth.is_open, false)) return;
  growth.ok = growth.ok && ok;
  growth_piece_ended(node, rank, here, index);
}

/// Counts the end of a transfer, or of the growth. After the last of them the chunk is hashed.
void World::growth_piece_ended(std::size_t node, std::uint32_t rank, const RankPullPtr& here, std::size_t index) {
  if (--here->growths.at(index).num_pending > 0) return;
  at_in_life(now() + delay(node, node) / 4, node,
             [this, node, rank, here, index] { growth_ended(node, rank, *here, index); });
}

void World::growth_ended(std::size_t node, std::uint32_t rank, RankPull& here, std::size_t index) {
  RankPull::Growth& growth = here.growths.at(index);
  const std::optional<std::uint64_t> checksum = growth.ok ? growth.checksum : std::nullopt;
  growth.is_whole = nodes_[node].engine->workers()[rank].end_landing(here.wanted.items[index].local, checksum);
  tally_.growth_whole += growth.is_whole;
  tally_.growth_mismatched += checksum && !growth.is_whole;
  if (checksum && !growth.is_whole && !growth.is_tainted)
    throw Broken(
        fmt::format("verified-only: what node {} has pulled of a growing chunk, layer by layer, is not what was "
                    "saved",
                    node));
  mishaps_.to_chunks(&Tally::excused_time_over, node, {&growth.key, 1}, here.began, now());
  part_ended(node, rank, here);
}

}  // namespace kvferry::sim
