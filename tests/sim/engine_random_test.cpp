// Seeded random schedules. KVFERRY_SEED=N replays one seed, KVFERRY_SEEDS=N runs seeds 1 .. N.
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>

#include "check_throws.h"
#include "sim_world.h"

namespace kvferry::sim {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::uint64_t kOneNodeSeeds = 400, kTwoNodeSeeds = 200;
#else
constexpr std::uint64_t kOneNodeSeeds = 3000, kTwoNodeSeeds = 1500;
#endif

/// What happened over all seeds, so that a simulation in which nothing happens is no success.
struct Tally {
  std::uint64_t preemptions = 0, failed_loads = 0, restarts = 0, hand_offs_whole = 0, loads = 0, resumed_hits = 0,
                evictions = 0, pulls = 0, fetch_timeouts = 0;
  bool one_seed = false;  // a replay, in which much may not happen
  void add(MiniEngine& engine) {
    const CoreCounters& counters = engine.core().counters();
    preemptions += engine.num_preemptions();
    failed_loads += engine.num_failed_loads();
    loads += counters.loads;
    resumed_hits += counters.resumed_hit_tokens;
    evictions += counters.evicted_chunks;
    pulls += counters.pulled_chunks;
    fetch_timeouts += counters.fetch_timeouts;
  }
};

/// Runs one simulation for each seed; the first failing one is told with what replays it.
Tally for_each_seed(std::uint64_t num_seeds, const std::function<void(std::uint64_t seed, Tally& tally)>& simulate) {
  Tally tally;
  const ChecksThrow checks;
  const auto number = [](const char* name) {
    const char* text = std::getenv(name);
    return text == nullptr ? 0 : std::strtoull(text, nullptr, 10);
  };
  const std::uint64_t only = number("KVFERRY_SEED");
  tally.one_seed = only > 0;
  const std::uint64_t last = only > 0 ? only : number("KVFERRY_SEEDS") > 0 ? number("KVFERRY_SEEDS") : num_seeds;
  for (std::uint64_t seed = only > 0 ? only : 1; seed <= last; ++seed) {
    try {
      simulate(seed, tally);
    } catch (const std::exception& broken) {
      const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
      ADD_FAILURE() << "seed " << seed << ": " << broken.what() << "\nreplay: KVFERRY_SEED=" << seed
                    << " engine_random_test --gtest_filter=" << test->test_suite_name() << "." << test->name();
      break;
    }
  }
  return tally;
}

std::uint64_t count_load_lines(const std::vector<Action>& actions) {
  return static_cast<std::uint64_t>(std::count_if(actions.begin(), actions.end(), [](const Action& action) {
    const auto* line = std::get_if<LogLine>(&action);
    return line != nullptr && line->text.find("to load") != std::string::npos;
  }));
}

void run_one_node(std::uint64_t seed, bool with_faults, Tally& tally) {
  Dice dice(seed);
  SimOptions options = draw_options(dice, with_faults);
  const EngineConfig& config = options.engine;
  StampBook book;
  MiniEngine engine(options.core, config, book);
  engine.refuse = [&](const std::string&) {
    if (!dice.chance(options.refuses)) return Refusal::kNone;
    return dice.chance(0.5) ? Refusal::kSkip : Refusal::kBreak;
  };
  Prompts prompts(dice, options.max_tokens_total);
  std::vector<RequestSpec> specs;
  std::set<std::string> aborted;
  CoreCounters counters;
  std::uint64_t lines = 0;
  TimeNs now = kSecond;
  const std::uint32_t num_requests = dice.between(2, 8);
  for (int steps = 0; specs.size() < num_requests || engine.num_unfinished() > 0; ++steps) {
    if (steps > 20000) throw Broken("no progress");
    now += dice.between(1, 20) * kMillisecond;
    if (specs.size() < num_requests && dice.chance(0.3)) {
      specs.push_back(prompts.draw("r" + std::to_string(specs.size())));
      engine.add(specs.back(), now);
    }
    if (!specs.empty() && dice.chance(options.aborts)) {
      const std::string id = specs[dice.raw() % specs.size()].id;
      if (!engine.finished().contains(id)) aborted.insert(id);
      engine.abort(id, now);
    }
    if (dice.chance(options.preempts_all)) engine.preempt_all();
    if (dice.chance(options.resets_cache)) engine.core().reset_cache();
    engine.step(now);
    lines += count_load_lines(engine.take_actions());
    check_counters(engine.core().counters(), counters);
  }
  for (int i = 0; i < 4; ++i) engine.step(now += 100 * kSecond);
  lines += count_load_lines(engine.take_actions());
  if (lines != engine.core().counters().loads)
    throw Broken(fmt::format("{} loads, {} told in the log", engine.core().counters().loads, lines));
  check_idle(engine.core());
  tally.add(engine);
  const bool all_load = engine.num_failed_loads() == 0;
  for (const RequestSpec& spec : specs) {
    if (!aborted.contains(spec.id)) check_admissions(spec.id, engine.finished().at(spec.id), all_load);
    const std::size_t said = engine.outputs().at(spec.id).size();
    const std::size_t plain =
        say(spec.prompt, spec.max_tokens, spec.stops, spec.extras).tokens.size() - spec.prompt.size();
    if (aborted.contains(spec.id) ? said > plain : said != plain)
      throw Broken(fmt::format("request {} says {} tokens, a plain engine {}", spec.id, said, plain));
  }
}

/// Prompts are prefilled on one node and answered on the other; some go to one node alone.
void run_two_nodes(std::uint64_t seed, bool with_faults, Tally& tally) {
  Dice dice(seed);
  SimOptions options = draw_options(dice, with_faults && dice.chance(0.5));
  options.core.load_timeout = dice.pick({1, 5}) * kSecond;
  options.core.try_timeout = options.core.load_timeout / 5;
  options.core.pull_timeout = options.core.load_timeout / 2;
  const NetworkOptions network = draw_network(dice, with_faults);
  World world(options, network, dice);
  Prompts prompts(dice, options.max_tokens_total);
  std::map<std::string, RequestSpec> asked;
  std::set<std::string> waiting;  // for their prefill
  std::set<std::string> handed_off;
  const std::uint32_t num_requests = dice.between(2, 6);
  const auto finished = [&](std::size_t node, const std::string& id) {
    return world.engine(node).finished().contains(id);
  };
  const auto done = [&] {
    return asked.size() == num_requests && waiting.empty() &&
           world.engine(World::kPrefill).num_unfinished() + world.engine(World::kDecode).num_unfinished() == 0;
  };
  for (int steps = 0; !done(); ++steps) {
    if (steps > 20000) throw Broken("no progress");
    if (asked.size() < num_requests && dice.chance(0.2)) {
      RequestSpec spec = prompts.draw("r" + std::to_string(asked.size()));
      asked[spec.id] = spec;
      if (dice.chance(0.2)) {
        world.add(dice.between(0, 1), spec);
      } else {
        waiting.insert(spec.id);
        spec.max_tokens = 1;
        spec.handoff = true;
        world.add(World::kPrefill, spec);
      }
    }
    world.step();
    for (const std::string& id : std::set(waiting)) {
      if (!finished(World::kPrefill, id)) continue;
      waiting.erase(id);
      const FinishedRequest& prefilled = world.engine(World::kPrefill).finished().at(id);
      RequestSpec spec = asked.at(id);
      if (prefilled.handoff) {
        spec.source = world.source(id, prefilled.handoff_tokens);
        handed_off.insert(id);
      }
      world.add(World::kDecode, spec);
    }
  }
  world.settle();
  tally.add(world.engine(World::kPrefill));
  tally.add(world.engine(World::kDecode));
  tally.restarts += world.num_restarts();
  // Where nothing is in the way, the decode node computes nothing of a prompt but its last token.
  const bool calm = !with_faults && network.max_delay <= 20 * kMillisecond && options.core.num_slots == 200 &&
                    options.core.chunk_tokens >= 8 &&
                    options.aborts + options.preempts_all + options.resets_cache + options.orders == 0;
  for (const auto& [id, spec] : asked) {
    const MiniEngine& engine = world.engine(finished(World::kDecode, id) ? World::kDecode : World::kPrefill);
    const std::size_t said = engine.outputs().contains(id) ? engine.outputs().at(id).size() : 0;
    const std::size_t plain =
        say(spec.prompt, spec.max_tokens, spec.stops, spec.extras).tokens.size() - spec.prompt.size();
    if (options.aborts == 0 && network.restarts == 0 && said != plain)
      throw Broken(fmt::format("request {} says {} tokens, a plain engine {}", id, said, plain));
    if (!calm || !handed_off.contains(id)) continue;
    const Admission& first = engine.finished().at(id).admissions.at(0);
    if (first.hit + 1 < spec.prompt.size())
      throw Broken(
          fmt::format("request {} finds {} of {} tokens that were handed off", id, first.hit, spec.prompt.size()));
    tally.hand_offs_whole += 1;
  }
}

TEST(EngineRandom, OneNodeSaysWhatAPlainEngineSays) {
  const Tally tally = for_each_seed(kOneNodeSeeds, [](std::uint64_t seed, Tally& t) { run_one_node(seed, false, t); });
  if (tally.one_seed) return;
  EXPECT_GT(tally.preemptions, 0u);
  EXPECT_GT(tally.resumed_hits, 0u);
  EXPECT_GT(tally.evictions, 0u);
  EXPECT_EQ(tally.failed_loads, 0u);
}

TEST(EngineRandom, OneNodeWithFailingSavesAndDamagedChunksSaysWhatAPlainEngineSays) {
  const Tally tally = for_each_seed(kOneNodeSeeds, [](std::uint64_t seed, Tally& t) { run_one_node(seed, true, t); });
  if (tally.one_seed) return;
  EXPECT_GT(tally.loads, tally.failed_loads);
  EXPECT_GT(tally.failed_loads, 0u);
}

TEST(EngineRandom, TwoNodesSayWhatAPlainEngineSays) {
  const Tally tally = for_each_seed(kTwoNodeSeeds, [](std::uint64_t seed, Tally& t) { run_two_nodes(seed, false, t); });
  if (tally.one_seed) return;
  EXPECT_GT(tally.pulls, 0u);
  EXPECT_GT(tally.hand_offs_whole, 0u);
  EXPECT_EQ(tally.failed_loads, 0u);
}

TEST(EngineRandom, TwoNodesWithLossDeathAndDamageSayWhatAPlainEngineSays) {
  const Tally tally = for_each_seed(kTwoNodeSeeds, [](std::uint64_t seed, Tally& t) { run_two_nodes(seed, true, t); });
  if (tally.one_seed) return;
  EXPECT_GT(tally.pulls, 0u);
  EXPECT_GT(tally.restarts, 0u);
  EXPECT_GT(tally.fetch_timeouts, 0u);
}

}  // namespace
}  // namespace kvferry::sim
