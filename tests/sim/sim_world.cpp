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
  Shape shape;
  std::vector<Shard>& shards = shape.shards;
  // Layers that are alike on all nodes are one, except where groups of them are announced.
  const std::uint32_t num_layers = core.pushes_layers ? 3 : 1;
  for (std::uint32_t rank = 0; rank < core.num_ranks; ++rank) shards.push_back({0, num_layers, rank, 1});
  if (options_.layers > 0) shape = draw_shape(dice_, options_);
  core.num_ranks = static_cast<std::uint32_t>(shards.size());
  node.engine = std::make_unique<MiniEngine>(core, engine, book_, shards, shape.parts);
  node.ranks.clear();
  for (const Shard& shard : shards)
    node.ranks.push_back({"", "", shard.num_cells(), shard, options_.num_frames > 0 ? "frames" : "", 1});
  for (std::size_t rank = 0; rank < shape.parts.size(); ++rank) {
    node.ranks[rank].parts = shape.parts[rank];
    node.ranks[rank].chunk_bytes = shape.parts[rank].num_bytes();
  }
  for (Worker& worker : node.engine->workers()) {
    worker.set_frames(options_.num_frames);
    worker.set_growth(core.pushes_layers ? 0.8 : 0);
  }
  if (const Result<void> fits = check_ranks(node.ranks); !fits) throw Broken("exact-load: " + fits.error().what);
  node.run_checksums = std::make_unique<RunChecksums>(shards, parts_of(node.ranks));
  node.frame_leases = {};
  node.answers.clear();
  node.holders.clear();
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
