// Draws a whole simulated set-up from a seed: sizes, switches, faults, requests. Everything that a run does follows
// from its seed, so the seed is the bug report.
#pragma once

#include <random>
#include <vector>

#include "mini_engine.h"

namespace kvferry::sim {

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : rng_(seed * 0x9e3779b97f4a7c15ULL + 1) {}
  /// Uniform in [low, high].
  std::uint32_t between(std::uint32_t low, std::uint32_t high) {
    return low + static_cast<std::uint32_t>(rng_() % (high - low + 1));
  }
  bool chance(double p) { return std::uniform_real_distribution<>(0, 1)(rng_) < p; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[rng_() % values.size()];
  }
  std::uint64_t raw() { return rng_(); }

 private:
  std::mt19937_64 rng_;
};

struct SimOptions {
  CoreConfig core;
  EngineConfig engine;
  std::uint32_t max_tokens_total = 0;  // of one request: so many fit the engine alone
  double refuses = 0;                  // a look-up is followed by no allocation
  double aborts = 0;                   // per step
  double preempts_all = 0;             // per step
  double resets_cache = 0;             // per step
  double orders = 0;                   // of a controller, per step
};

SimOptions draw_options(Dice& dice, bool with_worker_faults);

/// Prompts that share prefixes with each other and with earlier answers, as conversations do.
class Prompts {
 public:
  Prompts(Dice& dice, std::uint32_t max_tokens_total);
  RequestSpec draw(const std::string& id);

 private:
  Dice& dice_;
  std::uint32_t max_tokens_total_;
  std::vector<std::vector<std::int32_t>> seen_;
};

/// Throws Broken when a counter shrank or counts more than there is. Call after each step with the same `last`.
void check_counters(const CoreCounters& now, CoreCounters& last);
/// Throws Broken unless each admission's counts fit together. all_load: nothing was damaged.
void check_admissions(const std::string& id, const FinishedRequest& done, bool all_load);
/// Throws Broken unless nothing is held, written or waited for. Call when every deadline has passed.
void check_idle(const SchedulerCore& core);

}  // namespace kvferry::sim
