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
  bool chance(double p) { return p > 0 && static_cast<double>(rng_() >> 11) * 0x1p-53 < p; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[rng_() % values.size()];
  }
  std::uint64_t raw() { return rng_(); }

 private:
  std::mt19937_64 rng_;
};

/// What may go wrong on the way, each with its probability.
struct NetworkOptions {
  TimeNs max_delay = 20 * kMillisecond;
  double loses = 0;            // a message
  double doubles = 0;          // a message
  double damages_pull = 0;     // a chunk on its way
  double fails_grants = 0;     // a slot to which a worker cannot grant access
  double damages_pool = 0;     // a chunk at rest, per step
  double stalls = 0;           // a writer, inside a slot that is to be taken back from it
  double crashes = 0;          // a node, per step; it comes back empty, later
  double cuts = 0;             // the link of two nodes, per step, for a while
  double slows = 0;            // a node, per step, for a while
  double blocks = 0;           // the bytes of two nodes, and no message, per step, for a while
  double loses_directory = 0;  // or finds it again, per step
  double stale_offers = 0;     // an answer of the directory is an old one
  double garbage = 0;          // per step
};

struct SimOptions {
  CoreConfig core;
  EngineConfig engine;
  NetworkOptions network;
  std::uint32_t num_prefill = 0;  // 0: one node that does everything, and no network
  std::uint32_t num_decode = 0;
  std::uint32_t num_requests = 0;
  std::uint32_t max_tokens_total = 0;  // of one request: so many fit the engine alone
  double refuses = 0;                  // a lookup is followed by no allocation
  double aborts = 0;                   // per step
  double preempts_all = 0;             // per step
  double resets_idle = 0;              // per step
  double resets_connector = 0;         // per step
  double sleeps = 0;                   // per step
  double orders = 0;                   // of a controller, per step
  double pushes = 0;                   // a prefill knows its decode node
  double siblings = 0;                 // a request comes twice
  double ids_again = 0;                // a new request takes the id of one that is gone
  std::uint32_t layers = 0;            // of a model that each node cuts up in its own way; 0: all in the same
  std::uint32_t heads = 0;
};

SimOptions draw_options(Dice& dice);

/// A node of any shape: stages, uneven ones too, of ranks with a part of the heads each, or with the same ones.
std::vector<Shard> draw_shape(Dice& dice, const SimOptions& options);

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

}  // namespace kvferry::sim
