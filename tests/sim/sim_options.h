// Draws a whole simulated set-up from a seed: sizes, options, faults, requests. The seed decides everything that
// happens in a run, so a report of a fault needs only the seed.
#pragma once

#include <random>
#include <vector>

#include "mini_engine.h"

namespace kvferry::sim {

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : rng_(seed * 0x9e3779b97f4a7c15ULL + 1) {}
  /// Returns a random number in [low, high].
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

/// The probability of each network fault.
struct NetworkOptions {
  TimeNs max_delay = 20 * kMillisecond;
  double loses = 0;            // loses a message
  double doubles = 0;          // sends a message twice
  double damages_pull = 0;     // damages a chunk during a pull
  double fails_grants = 0;     // a worker can't grant access to a slot
  double damages_pool = 0;     // damages a chunk in a pool, in each step
  double loses_frames = 0;     // the copy of a pulled chunk from its frame to its slot fails
  bool copies_slowly = false;  // these copies take ten times as long
  double tells_early = 0;      // a worker says that layers are in its frame before they are
  double stalls = 0;           // a writer stays too long in a slot that is to be revoked
  double crashes = 0;          // kills a node, in each step; the node returns empty later
  double cuts = 0;             // cuts the link of two nodes for a while, in each step
  double slows = 0;            // slows a node for a while, in each step
  double blocks = 0;           // blocks the bytes between two nodes for a while, but not the messages, in each step
  double loses_directory = 0;  // loses the directory or finds it again, in each step
  double stale_offers = 0;     // the directory gives an old answer
  double garbage = 0;          // sends garbage, in each step
  double lies = 0;             // a node tells another one wrong parts of its ranks
};

struct SimOptions {
  CoreConfig core;
  EngineConfig engine;
  NetworkOptions network;
  std::uint32_t num_prefill = 0;  // 0: one node that does everything, without a network
  std::uint32_t num_decode = 0;
  std::uint32_t num_requests = 0;
  double asks = 0.25;                   // probability of a new request in each step
  bool asks_alone = false;              // a request comes only when all before it have gone to their decode nodes
  std::uint32_t hands_over_within = 0;  // longest time in ms from the end of a prefill to the request for its decode
  std::uint32_t num_tenants = 0;  // tenants besides the first, which sends most requests; 0: no request has a salt
  // limit on the tokens of one request, so that the request alone fits into the engine
  std::uint32_t max_tokens_total = 0;
  double refuses = 0;           // probability that no allocation follows a lookup
  double aborts = 0;            // probability of an abort in each step
  double preempts_all = 0;      // probability in each step that all requests are preempted
  double resets_idle = 0;       // probability in each step of a reset of the prefix cache, which a busy engine refuses
  double resets_connector = 0;  // probability in each step of a reset of the connector's cache
  double sleeps = 0;            // probability in each step that the engine sleeps and wakes
  double updates = 0;           // probability in each step that the weights are updated
  double orders = 0;            // probability of an order from the controller in each step
  double pushes = 0;            // probability that a prefill knows its decode node
  double siblings = 0;          // probability that a request is sent twice
  double ids_again = 0;         // probability that a new request gets the id of one that has ended
  // True if the decode nodes convert what they load, and so save nothing.
  bool decode_converts = false;
  // layers of a model that each node divides in its own way; 0: all nodes have the same shape
  std::uint32_t layers = 0;
  std::uint32_t heads = 0;
  // True if every other of these layers has a state, so that ranks are described by parts.
  bool has_parts = false;
  bool has_pair_on_all = false;  // every rank has all of B and C
  std::uint32_t num_frames = 0;  // frames of GPU memory of each rank; 0: the blocks are in host memory
};

SimOptions draw_options(Dice& dice);

struct Shape {
  std::vector<Shard> shards;      // [rank]
  std::vector<ShardParts> parts;  // [rank]; empty unless the model has layers with states
};
/// Returns the shape of a node: stages, which may be uneven. The ranks of a stage have a part of the heads each, or all
/// have the same heads.
Shape draw_shape(Dice& dice, const SimOptions& options);

/// Draws prompts that share prefixes with each other and with earlier answers, as in conversations.
class Prompts {
 public:
  Prompts(Dice& dice, std::uint32_t max_tokens_total, std::uint32_t num_tenants);
  RequestSpec draw(const std::string& id);

 private:
  Dice& dice_;
  std::uint32_t max_tokens_total_;
  std::uint32_t num_tenants_;
  std::vector<std::vector<std::int32_t>> seen_;
};

}  // namespace kvferry::sim
