#include "sim_options.h"

#include <fmt/format.h>

#include <algorithm>

namespace kvferry::sim {

SimOptions draw_options(Dice& dice, bool with_worker_faults) {
  SimOptions options;
  CoreConfig& core = options.core;
  core.fingerprint = "sim";
  core.block_tokens = dice.pick({4u, 8u, 16u});
  core.chunk_tokens = dice.chance(0.2) ? core.block_tokens / 2 : core.block_tokens * dice.pick({1u, 2u, 4u});
  core.num_ranks = dice.pick({1u, 1u, 2u});
  core.num_slots = dice.pick({2u, 5u, 16u, 200u});
  core.save_decode_cache = dice.chance(0.8);
  core.save_unfull_chunk = dice.chance(0.8);
  EngineConfig& engine = options.engine;
  const std::uint32_t most_blocks = dice.between(3, 12);
  options.max_tokens_total = most_blocks * core.block_tokens;
  engine.num_blocks = 1 + most_blocks + dice.between(0, most_blocks);
  engine.token_budget = dice.pick({7u, 16u, 64u, 256u});
  engine.max_running = dice.between(1, 6);
  engine.prefix_caching = dice.chance(0.7);
  engine.uncached_first = dice.chance(0.5);
  engine.async = dice.chance(0.5);
  engine.seed = dice.raw();
  if (with_worker_faults) {
    engine.faults.save_fails = dice.pick({0.0, 0.02, 0.3});
    engine.faults.corrupts_load = dice.pick({0.0, 0.05, 0.5});
  }
  options.refuses = dice.pick({0.0, 0.05, 0.3});
  options.aborts = dice.pick({0.0, 0.02});
  options.preempts_all = dice.pick({0.0, 0.0, 0.03});
  options.resets_cache = dice.pick({0.0, 0.0, 0.02});
  options.orders = dice.pick({0.0, 0.0, 0.05});
  return options;
}

Prompts::Prompts(Dice& dice, std::uint32_t max_tokens_total) : dice_(dice), max_tokens_total_(max_tokens_total) {}

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
  if (dice_.chance(0.1)) spec.extras = "lora";
  seen_.push_back(say(spec.prompt, spec.max_tokens, spec.stops, spec.extras).tokens);
  return spec;
}

void check_counters(const CoreCounters& now, CoreCounters& last) {
  const auto grows = [](const char* name, std::uint64_t before, std::uint64_t after) {
    if (after < before) throw Broken(fmt::format("counter {} shrank from {} to {}", name, before, after));
  };
  grows("lookups", last.lookups, now.lookups);
  grows("lookup_hits", last.lookup_hits, now.lookup_hits);
  grows("hit_tokens", last.hit_tokens, now.hit_tokens);
  grows("loads", last.loads, now.loads);
  grows("loaded_tokens", last.loaded_tokens, now.loaded_tokens);
  grows("resumed_hit_tokens", last.resumed_hit_tokens, now.resumed_hit_tokens);
  grows("saved_tokens", last.saved_tokens, now.saved_tokens);
  grows("evicted_chunks", last.evicted_chunks, now.evicted_chunks);
  grows("pulled_chunks", last.pulled_chunks, now.pulled_chunks);
  if (now.lookup_hits > now.lookups || now.loaded_tokens > now.hit_tokens || now.resumed_hit_tokens > now.hit_tokens)
    throw Broken("the counters count more than there is");
  last = now;
}

void check_admissions(const std::string& id, const FinishedRequest& done, bool all_load) {
  for (std::size_t i = 0; i < done.admissions.size(); ++i) {
    const Admission& admission = done.admissions[i];
    // vLLM finishes a request before it hands over its step's report, so the last load may not be told here.
    const bool loads_all =
        admission.loaded == admission.to_load || (i + 1 == done.admissions.size() && admission.loaded == 0);
    const bool fits = admission.local + admission.to_load <= admission.hit && admission.loaded <= admission.to_load;
    if (!fits || (all_load && !loads_all))
      throw Broken(fmt::format("request {} attempt {}: hit {}, local {}, to load {}, loaded {}", id, admission.attempt,
                               admission.hit, admission.local, admission.to_load, admission.loaded));
  }
}

void check_idle(const SchedulerCore& core) {
  if (core.num_requests() + core.num_fetches() + core.num_open_lookups() + core.num_ordered_fetches() > 0)
    throw Broken(fmt::format("idle with {} requests, {} fetches, {} look-ups, {} ordered fetches", core.num_requests(),
                             core.num_fetches(), core.num_open_lookups(), core.num_ordered_fetches()));
  if (core.pool().num_pins() + core.pool().num_pinned() + core.pool().num_writing() > 0)
    throw Broken(fmt::format("idle with {} holds on {} slots, {} slots being written", core.pool().num_pins(),
                             core.pool().num_pinned(), core.pool().num_writing()));
}

}  // namespace kvferry::sim
