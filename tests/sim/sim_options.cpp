#include "sim_options.h"

#include <algorithm>
#include <iterator>

#include "sim_parts.h"

namespace kvferry::sim {
namespace {

void draw_engine(Dice& dice, SimOptions& options) {
  CoreConfig& core = options.core;
  EngineConfig& engine = options.engine;
  const std::uint32_t most_blocks = dice.between(3, 12);
  options.max_tokens_total = most_blocks * core.groups[0].block_tokens;
  const std::uint32_t room = options.max_tokens_total + dice.between(0, most_blocks) * core.groups[0].block_tokens;
  engine.num_blocks = 1;
  for (const KvGroup& group : core.groups) engine.num_blocks += blocks_for(group, room);
  engine.token_budget = dice.pick({7u, 16u, 64u, 256u});
  engine.max_running = dice.between(1, 6);
  engine.prefix_caching = dice.chance(0.7);
  engine.uncached_first = dice.chance(0.5);
  engine.async = dice.chance(0.5);
  engine.tells_late = dice.chance(0.7);
  engine.num_drafts = dice.pick({0u, 0u, 1u, 3u});
  engine.accepts_draft = dice.pick({0.2, 0.7});
  engine.asks_again = dice.pick({0.0, 0.3});
  engine.seed = dice.raw();
  options.refuses = dice.pick({0.0, 0.05, 0.3});
}

/// Draws what goes wrong in one node.
void draw_trouble(Dice& dice, SimOptions& options) {
  options.engine.faults.save_fails = dice.pick({0.0, 0.0, 0.02, 0.3});
  options.engine.faults.corrupts_load = dice.pick({0.0, 0.0, 0.05, 0.5});
  options.engine.fails_requests = dice.chance(0.3);
  options.aborts = dice.pick({0.0, 0.02, 0.1});
  options.preempts_all = dice.pick({0.0, 0.0, 0.03});
  options.resets_idle = dice.pick({0.0, 0.0, 0.03});
  options.resets_connector = dice.pick({0.0, 0.0, 0.02});
  options.sleeps = dice.pick({0.0, 0.0, 0.02});
  options.siblings = dice.pick({0.0, 0.3});
  options.ids_again = dice.pick({0.0, 0.3});
  options.network.damages_pool = dice.pick({0.0, 0.0, 0.05});
  options.updates = dice.pick({0.0, 0.0, 0.02});
}

void draw_network(Dice& dice, SimOptions& options) {
  NetworkOptions& network = options.network;
  if (dice.chance(0.2)) network.max_delay = 3 * kSecond;
  network.loses = dice.pick({0.0, 0.05, 0.4});
  network.doubles = dice.pick({0.0, 0.1});
  network.damages_pull = dice.pick({0.0, 0.0, 0.2});
  network.fails_grants = dice.pick({0.0, 0.0, 0.2});
  network.stalls = dice.pick({0.0, 0.0, 0.1});
  network.crashes = dice.pick({0.0, 0.0, 0.005});
  network.cuts = dice.pick({0.0, 0.0, 0.01});
  network.slows = dice.pick({0.0, 0.0, 0.01});
  network.blocks = dice.pick({0.0, 0.0, 0.003});
  network.loses_directory = dice.pick({0.0, 0.0, 0.02});
  network.stale_offers = dice.pick({0.0, 0.2});
  network.garbage = dice.pick({0.0, 0.0, 0.1});
  options.orders = dice.pick({0.0, 0.0, 0.05});
}

/// Gives every node a GPU. Nothing is drawn, so that the schedules of other seeds stay as they are.
void put_on_gpus(SimOptions& options, bool has_trouble) {
  constexpr std::uint32_t kNumFrames[] = {1, 2, 6, 100};
  options.core.on_device = true;
  options.core.prepared_tokens_max = 0;  // a node with a GPU prepares nothing
  options.num_frames = kNumFrames[options.engine.seed / 4 % std::size(kNumFrames)];
  if (has_trouble && options.engine.seed / 16 % 2 == 0) options.network.loses_frames = 0.2;
  options.network.copies_slowly = options.engine.seed / 32 % 2 == 0;
  options.core.pushes_layers = options.engine.seed / 64 % 4 != 3;
  if (!options.core.pushes_layers) return;
  // A decode node pulls layers only after it has pulled from the frames of the prefill node.
  options.num_requests += 10;
  options.asks = options.engine.seed / 4096 % 2 == 0 ? 0.04 : 0.15;
  options.asks_alone = options.engine.seed / 16384 % 4 != 0;
  options.num_prefill = options.num_decode = 1;
  options.pushes = 1;
  if (options.engine.seed / 65536 % 4 != 0) options.core.num_slots = std::max(options.core.num_slots, 16u);
  options.hands_over_within = options.engine.seed / 1024 % 4 == 0 ? 0 : 600;
  options.num_frames = std::max(options.num_frames, 6u);
  if (options.engine.seed / 8192 % 4 != 0) options.layers = 0;
  if (has_trouble && options.engine.seed / 128 % 2 == 0) options.network.tells_early = 0.5;
  if (has_trouble && options.engine.seed / 512 % 2 == 0) options.core.lease_ttl = 100 * kMillisecond;
}

/// Gives every node chunks of whole blocks. Nothing is drawn, as above.
void take_whole_blocks(CoreConfig& core, std::uint64_t seed) {
  core.whole_blocks = true;
  core.chunk_tokens = alignment_of(core.groups) << seed % 3;
}

/// Gives most nodes of a model with states a shape of their own. Nothing is drawn, as above.
void divide_states(SimOptions& options, bool has_trouble) {
  const std::uint64_t seed = options.engine.seed / 4;
  if (seed % 8 != 0) {
    options.layers = 2 + seed / 8 % 3;
    options.heads = 1 + seed / 32 % 2;
  }
  options.has_pair_on_all = seed / 64 % 4 != 0;
  if (has_trouble && seed / 256 % 2 == 0) options.network.lies = 0.6;
}

}  // namespace

SimOptions draw_options(Dice& dice) {
  SimOptions options;
  CoreConfig& core = options.core;
  core.fingerprint = "sim";
  const std::uint32_t blocks = dice.pick({4u, 8u, 16u});
  core.groups = {{blocks}};
  core.chunk_tokens = dice.chance(0.2) ? blocks / 2 : blocks * dice.pick({1u, 2u, 4u});
  core.num_ranks = dice.pick({1u, 1u, 1u, 2u});
  core.num_slots = dice.pick({2u, 5u, 16u, 200u});
  core.save_decode_cache = dice.chance(0.8);
  core.save_partial_chunks = dice.chance(0.8);
  if (dice.chance(0.3)) {
    const std::uint32_t window = dice.pick({3u, 8u, 13u, 24u, 40u});
    const std::uint32_t kind = dice.between(0, 6);
    if (kind == 0) core.groups.clear();
    core.groups.push_back({blocks, window});
    if (kind == 1) core.groups.push_back({blocks, dice.pick({window, 5u, 24u})});
    if (kind == 2) core.groups.back().window_restarts = true;
    if (kind == 4) {
      core.keeps_state = true;
      core.chunk_tokens = core.groups.back().window = blocks;
      core.checkpoint_alignment = window % 2 == 0 ? blocks : 0;
    } else if (dice.chance(0.5)) {
      core.groups.back().block_tokens = dice.chance(0.5) ? blocks * 2 : blocks / 2;
    }
  }
  core.load_timeout = dice.pick({1, 5}) * kSecond;
  core.try_timeout = core.load_timeout / 5;
  core.pull_timeout = core.load_timeout / 2;
  core.tenant_idle = dice.pick({1, 600}) * kSecond;
  draw_engine(dice, options);
  if (core.keeps_state) options.engine.num_drafts = 0;
  if (!core.keeps_state && options.engine.seed / 64 % 4 == 0) take_whole_blocks(core, options.engine.seed / 256);
  const bool has_trouble = dice.chance(0.75);
  if (has_trouble) draw_trouble(dice, options);
  options.num_requests = dice.between(2, 6);
  if (dice.chance(0.4)) options.num_tenants = dice.between(1, 3);
  if (dice.chance(0.6)) return options;
  options.num_prefill = dice.pick({1u, 1u, 1u, 2u, 3u});
  options.num_decode = dice.pick({1u, 1u, 1u, 2u});
  options.network.max_delay = dice.pick({1, 20, 100}) * kMillisecond;
  options.pushes = dice.pick({0.0, 0.5, 1.0});
  if (core.groups.size() == 1 && core.groups[0].window == 0) core.prepared_tokens_max = dice.pick({0, 50, 1000});
  if (core.whole_blocks)
    core.prepared_tokens_max = 0;  // a preparation leaves one token to compute, which may be no block
  // no draw of its own, so that seeds keep their schedules; chunks of whole blocks are bytes, which can't be converted
  options.decode_converts = options.engine.seed % 7 == 0 && !core.whole_blocks;
  if (has_trouble) draw_network(dice, options);
  if (dice.chance(0.4)) {
    options.layers = dice.between(1, 3);
    options.heads = dice.pick({1u, 2u, 2u});
  }
  if (core.keeps_state) divide_states(options, has_trouble);
  if (options.engine.seed % 4 == 0) put_on_gpus(options, has_trouble);
  options.has_parts = core.keeps_state && options.layers > 1;  // a single layer would have no state
  if (core.keeps_state && !options.has_parts) options.layers = 0;
  return options;
}

Shape draw_shape(Dice& dice, const SimOptions& options) {
  const std::uint32_t tp_size = dice.pick({1u, 2u, 2u, 4u});
  Shape shape;
  for (std::uint32_t first = 0, end = 0; first < options.layers; first = end) {
    end = dice.between(first + 1, options.layers);
    for (std::uint32_t rank = 0; rank < tp_size; ++rank) {
      shape.shards.push_back(shard_of(first, end - first, options.heads, rank, tp_size));
      if (options.has_parts)
        shape.parts.push_back(parts_of_rank(shape.shards.back(), options.heads, rank, tp_size,
                                            options.core.chunk_tokens, options.has_pair_on_all));
    }
  }
  return shape;
}

Prompts::Prompts(Dice& dice, std::uint32_t max_tokens_total, std::uint32_t num_tenants)
    : dice_(dice), max_tokens_total_(max_tokens_total), num_tenants_(num_tenants) {}

RequestSpec Prompts::draw(const std::string& id) {
  RequestSpec spec;
  spec.id = id;
  const std::uint32_t most = max_tokens_total_ - 1;
  if (!seen_.empty() && dice_.chance(0.7)) {
    const std::vector<std::int32_t>& base = seen_[dice_.between(0, static_cast<std::uint32_t>(seen_.size()) - 1)];
    const auto size = static_cast<std::uint32_t>(base.size());
    const std::uint32_t keep = dice_.chance(0.5) ? size : dice_.between(1, size);
    spec.prompt.assign(base.begin(), base.begin() + std::min(keep, most));
  }
  const bool as_it_is = !spec.prompt.empty() && dice_.chance(0.2);
  std::uint32_t longer = as_it_is ? 0 : dice_.between(1, max_tokens_total_ / 2);
  for (; longer > 0 && spec.prompt.size() < most; --longer)
    spec.prompt.push_back(static_cast<std::int32_t>(dice_.between(1, 900)));
  spec.max_tokens = dice_.between(1, max_tokens_total_ - static_cast<std::uint32_t>(spec.prompt.size()));
  spec.stops = dice_.chance(0.3);
  spec.cacheable = !dice_.chance(0.03);
  if (dice_.chance(0.1)) spec.extras = "lora";
  if (num_tenants_ > 0) {
    spec.salt = "tenant " + std::to_string(dice_.chance(0.75) ? 0 : dice_.between(1, num_tenants_));
    spec.extras += spec.salt;
  }
  seen_.push_back(say(spec.prompt, spec.max_tokens, spec.stops, spec.extras).tokens);
  return spec;
}

}  // namespace kvferry::sim
