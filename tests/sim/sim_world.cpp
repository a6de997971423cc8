#include "sim_world.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "schedule_log.h"

namespace kvferry::sim {

World::World(const SimOptions& options, Dice& dice) : options_(options), network_(options.network), dice_(dice) {
  nodes_.resize(std::max(1u, options.num_prefill + options.num_decode));
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    nodes_[i].engine_id = EngineId{fmt::format("engine-{}", i)};
    nodes_[i].endpoint = fmt::format("tcp://node-{}:1", i);
    nodes_[i].member = fmt::format("m{}", i);
    start(i);
  }
}

void World::start(std::size_t index) {
  Node& node = nodes_[index];
  CoreConfig core = options_.core;
  EngineConfig engine = options_.engine;
  if (index > 0) {  // nodes may have different block sizes
    const std::uint32_t own_blocks = dice_.pick({4u, 8u, 16u});
    const std::uint32_t blocks = core.groups[0].block_tokens;
    for (KvGroup& group : core.groups)  // except where chunks are whole blocks, as in models with state
      if (!core.keeps_state && !core.whole_blocks) group.block_tokens = group.block_tokens * own_blocks / blocks;
    const auto groups = static_cast<std::uint32_t>(core.groups.size());
    engine.num_blocks = 1 + groups + blocks_for(core.groups[0], engine.num_blocks * blocks);
  }
  engine.seed += index + (node.incarnation << 8);
  node.incarnation += 1;
  node.is_up = true;
  core.endpoint = node.endpoint;
  core.member = node.member;
  core.only_reads = options_.decode_converts && index >= options_.num_prefill;
  core.secret = fmt::format("{} of {}", node.incarnation, index);
  node.num_load_lines = 0;
  node.pool_full = 0;
  std::vector<Shard> shards;
  // Layers that are alike on all nodes are one, except where groups of them are announced.
  const std::uint32_t num_layers = core.pushes_layers ? 3 : 1;
  for (std::uint32_t rank = 0; rank < core.num_ranks; ++rank) shards.push_back({0, num_layers, rank, 1});
  if (options_.layers > 0) shards = draw_shape(dice_, options_);
  core.num_ranks = static_cast<std::uint32_t>(shards.size());
  node.engine = std::make_unique<MiniEngine>(core, engine, book_, shards);
  node.ranks.clear();
  for (const Shard& shard : shards)
    node.ranks.push_back({"", "", shard.num_cells(), shard, options_.num_frames > 0 ? "frames" : "", 1});
  for (Worker& worker : node.engine->workers()) {
    worker.set_frames(options_.num_frames);
    worker.set_growth(core.pushes_layers ? 0.8 : 0);
  }
  node.run_checksums = std::make_unique<RunChecksums>(shards);
  node.frame_leases = {};
  node.answers.clear();
  node.maps.clear();
  node.engine->core().set_directory_up(directory_up_ && num_nodes() > 1);
  node.engine->refuse = [this](const std::string&) {
    deliver();  // messages may arrive between any two calls of the engine, because the network has a thread of its own
    return draw_exit();
  };
  node.engine->on_save_failed = [this, index](const ChunkKey& chunk) {
    to_chunk(&Tally::excused_save_failed, index, chunk);
  };
  node.engine->on_end = [&node](const std::string& id, End end, const std::vector<std::int32_t>&) {
    node.specs.erase(id);
    node.ended[id] = end;
  };
  for (const auto& [id, spec] : node.specs) node.engine->add(spec, now());  // the clients send their requests again
}

Exit World::draw_exit() {
  if (!dice_.chance(options_.refuses)) return Exit::kNone;
  return dice_.pick({Exit::kEncoderPending, Exit::kPrefillsDeferred, Exit::kDraftsPadded, Exit::kUnchunked,
                     Exit::kAlignedSplit, Exit::kEncoderBudget, Exit::kNoBlocks, Exit::kAnswerDropped,
                     Exit::kAnswerTrimmed});
}

void World::crash(std::size_t index) {
  Node& node = nodes_[index];
  if (!node.is_up || stepping_ == index) return;
  tell("node {} dies", index);
  for (const Node& reader : nodes_)
    for (const auto& [id, pull] : reader.pulls) tally_.crashed_while_read += pull.wanted.endpoint == node.endpoint;
  tally_.crashes += 1;
  tally_.prefill_crashes += is_prefill(index);
  tally_.growth_holder_died += has_growing(index);
  for (const auto& [id, pull] : node.pulls)
    tally_.growth_reader_died += std::ranges::any_of(pull.ranks, [](const RankPullPtr& rank) {
      return std::ranges::any_of(rank->growths, [](const auto& growth) { return growth.second.is_open; });
    });
  mishaps_.to_link(&Tally::excused_died, index, index, now());
  std::erase_if(suspected_, [&](const auto& link) { return link.first == index; });
  tally_.add(node.engine->tally());
  node.is_up = false;
  node.incarnation += 1;
  node.back_at = now() + dice_.between(1, 500) * kMillisecond;
  node.pulls.clear();
  node.pushes = {};
  node.brought_by.clear();
  node.told_early.clear();
  node.growth_began.clear();
  node.first_asked.clear();
  node.last_fetch = 0;
  node.asked.clear();
  node.forged_answers.clear();
  at(now() + 100 * kMillisecond, [&node] { node.listed.clear(); });  // the directory notices the loss late
}

void World::add(std::size_t index, const RequestSpec& spec) {
  Node& node = nodes_[index];
  node.specs[spec.id] = spec;
  node.ended.erase(spec.id);
  if (node.is_up) return node.engine->add(spec, now());
  node.engine->erase_finished(spec.id);  // otherwise an earlier request with this id would be taken for the new one
}

void World::abort(std::size_t index, const std::string& id) {
  Node& node = nodes_[index];
  if (node.is_up) return node.engine->abort(id, now());
  if (node.specs.erase(id) > 0) node.ended[id] = End::kAborted;  // the client does not send the request again
}

std::size_t World::num_unfinished() const {
  std::size_t num = 0;
  for (const Node& node : nodes_) num += node.specs.size();
  return num;
}

std::optional<End> World::end_of(std::size_t node, const std::string& id) const {
  const auto found = nodes_[node].ended.find(id);
  return found == nodes_[node].ended.end() ? std::nullopt : std::optional(found->second);
}

const FinishedRequest* World::finished(std::size_t node, const std::string& id) const {
  if (!nodes_[node].is_up) return nullptr;
  const auto& finished = nodes_[node].engine->finished();
  const auto found = finished.find(id);
  return found == finished.end() ? nullptr : &found->second;
}

HandoffSource World::source(std::size_t node, const FinishedRequest& prefilled) const {
  return {nodes_[node].endpoint, prefilled.handoff_name, prefilled.handoff_tokens, nodes_[node].member};
}

void World::deliver() {
  while (!events_.empty() && events_.begin()->first <= now()) {
    const std::function<void()> what = std::move(events_.begin()->second);
    events_.erase(events_.begin());
    what();
  }
}

void World::trouble() {
  if (num_nodes() > 1 && dice_.chance(network_.loses_directory)) {
    directory_up_ = !directory_up_;
    tally_.controller_losses += !directory_up_;
    tell("the directory {}", directory_up_ ? "is back" : "is gone");
    for (Node& node : nodes_) node.engine->core().set_directory_up(directory_up_);
  }
  if (num_nodes() > 1 && dice_.chance(network_.cuts)) {
    const std::size_t a = dice_.between(0, num_nodes() - 1), b = other(a);
    cut_until_[std::minmax(a, b)] = now() + dice_.between(1, 3000) * kMillisecond;
    tally_.partitions += 1;
  }
  if (num_nodes() > 1 && dice_.chance(network_.blocks)) {
    const std::size_t a = dice_.between(0, num_nodes() - 1), b = other(a);
    blocked_until_[std::minmax(a, b)] = now() + dice_.between(1, 60) * kSecond;
    tally_.blocked += 1;
  }
  for (std::size_t i = 0; i < num_nodes(); ++i) {
    Node& node = nodes_[i];
    if (num_nodes() > 1 && dice_.chance(network_.crashes))
      // a node may also crash in the middle of other nodes' steps
      at(now() + dice_.between(0, 30) * kMillisecond, [this, i] { crash(i); });
    if (!node.is_up) {
      if (now() >= node.back_at) start(i);
      continue;
    }
    trouble_node(i);
  }
}

void World::trouble_node(std::size_t index) {
  Node& node = nodes_[index];
  if (dice_.chance(options_.preempts_all)) node.engine->preempt_all();
  if (dice_.chance(options_.resets_idle)) node.engine->reset_idle_cache();
  if (dice_.chance(options_.sleeps)) {
    excuse_all_unpublished(index);
    node.engine->sleep();
  }
  if (dice_.chance(options_.updates)) {
    excuse_all_unpublished(index);
    node.engine->update_weights(now());
  }
  if (dice_.chance(options_.resets_connector)) {
    excuse_all_unpublished(index);
    tally_.resets_connector += 1;
    node.engine->core().reset_cache();
  }
  if (dice_.chance(network_.damages_pool))
    tally_.damaged_at_rest += node.engine->workers().back().damage(dice_.between(0, options_.core.num_slots - 1));
  if (num_nodes() == 1) return;
  if (dice_.chance(options_.orders)) at(now() + delay(index, index), [this, index] { order(index); });
  if (dice_.chance(network_.slows)) {
    node.slow_until = now() + dice_.between(1, 5000) * kMillisecond;
    tally_.slow_peers += 1;
  }
  if (dice_.chance(0.05)) node.listed_before = node.listed;
  if (dice_.chance(network_.garbage)) garbage(index);
}

void World::step_node(std::size_t index, double steps) {
  deliver();
  Node& node = nodes_[index];
  if (!node.is_up) return;
  stepping_ = index;
  for (Worker& worker : node.engine->workers()) worker.frames().expire(now());
  if (dice_.chance(steps)) node.engine->step(now());
  node.engine->core().tick(now());
  stepping_ = kDirectory;
  carry_out(index);
  check_purged(index);
}

void World::step() {
  clock_.advance(dice_.between(1, 20) * kMillisecond);
  if (listener != nullptr) listener->set_time(now());
  trouble();
  for (std::size_t i = 0; i < num_nodes(); ++i) step_node(i, 0.9);
}

/// Evicts chunks as an order does.
void World::evict(std::size_t index, std::span<const ChunkKey> keys) {
  SchedulerCore& core = nodes_[index].engine->core();
  for (const ChunkKey& key : keys)
    if (const ChunkPool::Slot* slot = core.pool().find(key)) excuse_unpublished(index, *slot);
  core.evict_ordered(keys);
}

/// Excuses that the chunk in this slot gets lost. The core does not announce its eviction if some rank has the chunk in
/// its frame only, because the chunk is not published then.
void World::excuse_unpublished(std::size_t index, const ChunkPool::Slot& slot) {
  if (slot.state == ChunkPool::State::kReady && !slot.is_complete())
    to_chunk(&Tally::excused_evicted, index, slot.meta.key);
}

void World::excuse_all_unpublished(std::size_t index) {
  tally_.growth_reset += has_growing(index);
  const ChunkPool& pool = nodes_[index].engine->core().pool();
  for (std::uint32_t i = 0; i < pool.num_slots(); ++i) {
    excuse_unpublished(index, pool.slot(i));
    if (is_save(pool.slot(i))) to_chunk(&Tally::excused_save_failed, index, pool.slot(i).meta.key);
  }
}

/// Sends an order that a controller may send at any time, about chunks that some node has or had.
void World::order(std::size_t index) {
  if (!nodes_[index].is_up) return;
  SchedulerCore& core = nodes_[index].engine->core();
  const std::size_t from = other(index);
  tally_.orders += 1;
  std::vector<ChunkMeta> chunks;
  for (const auto& [key, chunk] : nodes_[dice_.chance(0.5) ? index : from].listed)
    if (dice_.chance(0.5)) chunks.push_back(chunk);
  std::vector<ChunkKey> keys;
  for (const ChunkMeta& chunk : chunks) keys.push_back(chunk.key);
  const TimeNs ttl = dice_.between(0, 10) * kSecond;
  const std::uint64_t pin = dice_.between(1, 3);
  if (dice_.chance(0.1)) {
    tally_.purges += 1;
    for (const std::size_t node : {index, from}) mishaps_.to_link(&Tally::excused_purged, node, node, now());
    if (dice_.chance(0.3)) {
      core.admit_ordered("member:" + nodes_[from].member);
      return core.admit_ordered(nodes_[from].endpoint);
    }
    const Node& purged = nodes_[dice_.chance(0.9) ? from : index];
    const std::uint64_t id = dice_.between(1, 1000);
    const bool is_of_member = id % 2 == 0;
    tally_.purges_of_members += is_of_member;
    return core.purge_ordered(id, is_of_member ? "member:" + purged.member : purged.endpoint, now());
  }
  switch (dice_.between(0, 4)) {
    case 0:
      return core.pin_ordered(pin, keys, ttl, now());
    case 1:
      return core.unpin_ordered(pin);
    case 2:
      return evict(index, keys);
    case 3:
      excuse_all_unpublished(index);
      return core.reset_cache();
    default:
      return core.replicate_ordered({nodes_[from].endpoint, std::move(chunks), ttl, nodes_[from].member}, now());
  }
}

void World::calm_down() {
  tell("from now on nothing goes wrong");
  network_ = {};
  cut_until_.clear();
  blocked_until_.clear();
  for (Node& node : nodes_) node.slow_until = 0;
  options_.refuses = options_.preempts_all = options_.resets_idle = options_.resets_connector = 0;
  options_.sleeps = options_.updates = options_.orders = 0;
}

void World::settle() {
  calm_down();
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    // The last rounds are longer than the longest hold that a controller may order.
    clock_.advance(round + 3 < kRounds ? 30 * kSecond : options_.core.order_ttl_max);
    for (std::size_t i = 0; i < num_nodes(); ++i) {
      if (!nodes_[i].is_up) start(i);
      step_node(i, 1.0);
    }
  }
  for (Node& node : nodes_) {
    node.engine->check_idle();
    for (const Worker& worker : node.engine->workers())
      if (const std::size_t pins = worker.frames().num_pins(); pins > 0)
        throw Broken(fmt::format("bounded-hold: idle with {} pins of frames", pins));
    if (!node.pulls.empty()) throw Broken(fmt::format("exactly-once: {} pulls are never answered", node.pulls.size()));
    if (node.num_load_lines != node.engine->core().counters().loads)
      throw Broken(fmt::format("exactly-once: {} loads, {} told in the log", node.engine->core().counters().loads,
                               node.num_load_lines));
  }
}

Tally World::tally() const {
  Tally tally = tally_;
  for (const Node& node : nodes_)
    if (node.is_up) tally.add(node.engine->tally());
  return tally;
}

}  // namespace kvferry::sim
