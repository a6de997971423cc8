// Tests nodes of unlike tensor and pipeline parallelism that run a model with states: each value that a node has loaded
// must be the one that belongs there. The nodes are real, with the real transport, ZeroMQ and a controller.
#include <gtest/gtest.h>

#include <numeric>

#include "connector/runtime/links/shapes.h"
#include "connector/runtime/scheduler/scheduler_node.h"
#include "connector/runtime/worker/worker_node.h"
#include "tests/connector/runtime/or_throw.h"
#include "tests/connector/runtime/test_node.h"

namespace kvferry {
namespace {

constexpr std::uint32_t kStateLayers = 4, kStateHeads = 4, kStateTokens = 8, kStateDim = 8, kStatePlanes = 2,
                        kStateNumBlocks = 16;
constexpr std::uint32_t kStateHeadValues = kStatePlanes * kStateTokens * kStateDim;
constexpr float kStatePadding = -5;
constexpr BlockId kStateNullBlock = 0;

struct Share {
  std::uint32_t whole = 0;  // number of values on all ranks together; 0: padding
  bool is_on_all = false;   // true if each rank has all of them
};
// As in Mamba-2 with one group: each row of the convolution's window has x, which ranks divide, then B and C.
const std::vector<Share> kStateShares = {{64}, {8, true}, {8, true}, {64}, {8, true}, {8, true}, {256}};

struct StateShape {
  std::uint32_t tp = 1;
  std::vector<std::uint32_t> stages = {kStateLayers};
  std::string name() const { return fmt::format("tp {}, {} stages", tp, stages.size()); }
};

/// A node of a model in which every other layer has a state. Each value of its blocks tells its block and its place in
/// the whole model.
class StateNode {
 public:
  StateNode(const std::string& controller, const std::string& engine_id, const StateShape& shape) {
    SchedulerOptions options;
    const std::uint64_t slot =
        kStateLayers * kStateHeads * kStateHeadValues * sizeof(float) / shape.tp / shape.stages.size();
    options.config =
        value_or_throw(load_config(fmt::format(R"({{"chunk_tokens": {}, "pool_bytes": {}, "load_timeout_ms": 3000,
                                     "controller": "{}"}})",
                                               kStateTokens, 8 * slot, controller),
                                   [](const char*) { return nullptr; }));
    options.engine_id = EngineId{engine_id};
    options.role = "kv_both";
    options.fingerprint = "toy";
    options.groups = {{kStateTokens}, {kStateTokens, kStateTokens}};
    options.keeps_state = true;
    options.start_timeout_ms = 2000;
    scheduler_ = value_or_throw(SchedulerNode::start(options));
    std::vector<std::string> hellos;
    std::uint32_t first_layer = 0;
    for (const std::uint32_t layers : shape.stages) {
      for (std::uint32_t rank = 0; rank < shape.tp; ++rank) {
        const auto number = static_cast<std::uint32_t>(hellos.size());
        ranks_.push_back({shard_of(first_layer, layers, kStateHeads, rank, shape.tp), {}, {}});
        ranks_.back().parts = parts_for(ranks_.back().shard, rank, shape.tp);
        ranks_.back().memory.assign(std::size_t{layers} * kStateNumBlocks * page(), kStatePadding);
        workers_.push_back(value_or_throw(WorkerNode::start(
            {options.config, number, engine_id, {layout()}, ranks_.back().shard, ranks_.back().parts})));
        hellos.push_back(workers_.back()->handshake());
      }
      first_layer += layers;
    }
    ok_or_throw(scheduler_->attach_workers(hellos));
  }
  ~StateNode() {
    scheduler_->shutdown();
    for (auto& worker : workers_) worker->shutdown();
  }

  /// Computes the prompt as vLLM does, and returns where a decode node finds it.
  HandoffSource prefill(const std::string& id, const std::vector<std::int32_t>& prompt, std::uint32_t seed,
                        bool is_handed_over = true) {
    const auto num_tokens = static_cast<std::uint32_t>(prompt.size());
    const std::uint32_t boundary = (num_tokens - 1) / kStateTokens * kStateTokens;
    NewRequest made = new_request(id, prompt);
    made.handoff = is_handed_over;
    scheduler_->add_request(made);
    answered_lookup(*scheduler_, made.id, 0, [this] { step(); });
    scheduler_->allocated(made.id, 0, table(kStateTokens));
    each(boundary, seed, [](float& memory, float value) { memory = value; });
    step({{{made.id, 0, boundary, table(boundary)}}, {}});
    step({{{made.id, boundary, num_tokens - boundary, table(num_tokens)}}, {}});
    const FinishedRequest done = scheduler_->finished(made.id, num_tokens, table(num_tokens), false);
    step();
    return {fmt::format("tcp://{}:{}", scheduler_->host(), scheduler_->port()), done.handoff_name, done.handoff_tokens};
  }

  struct Loaded {
    std::uint32_t tokens = 0, values = 0, wrong = 0, padding = 0;
  };
  /// Admits the prompt, loads what is found, and compares all values. `padding` counts those that are not 0.
  Loaded load(const std::string& id, const std::vector<std::int32_t>& prompt, const HandoffSource& source,
              std::uint32_t seed) {
    for (Rank& rank : ranks_) std::fill(rank.memory.begin(), rank.memory.end(), kStatePadding);
    NewRequest made = new_request(id, prompt);
    made.source = source;
    scheduler_->add_request(made);
    Loaded loaded{answered_lookup(*scheduler_, made.id, 0, [this] { step(); }).num_external, 0, 0, 0};
    if (loaded.tokens == 0) return loaded;
    scheduler_->allocated(made.id, loaded.tokens, table(loaded.tokens));
    step();
    each(loaded.tokens, seed, [&](float& memory, float value) {
      loaded.values += value != kStatePadding;
      (value == kStatePadding ? loaded.padding : loaded.wrong) += memory != (value == kStatePadding ? 0 : value);
    });
    scheduler_->finished(made.id, loaded.tokens, table(loaded.tokens), true);
    return loaded;
  }
  double metric(const std::string& name) const { return scheduler_->metrics()[name]; }

 private:
  struct Rank {
    Shard shard;
    ShardParts parts;
    std::vector<float> memory;  // [layer][block][value], in the order of the chunk
  };
  static bool has_state(std::uint32_t layer) { return layer % 2 == 1; }
  std::size_t page() const { return std::size_t{ranks_.back().shard.num_heads} * kStateHeadValues; }

  static ShardParts parts_for(const Shard& shard, std::uint32_t rank, std::uint32_t tp) {
    const auto bytes = [](std::uint64_t values) { return values * sizeof(float); };
    ShardParts parts{shard.first_layer, {}, {{}, {}}};
    parts.parts[0] = {{bytes(kStateHeads * kStateHeadValues), bytes(shard.first_head * kStateHeadValues),
                       bytes(shard.num_heads * kStateHeadValues)}};
    std::uint64_t padding = bytes(shard.num_heads * kStateHeadValues);
    for (const Share& share : kStateShares) {
      const std::uint64_t own = share.is_on_all ? share.whole : share.whole / tp;
      parts.parts[1].push_back({bytes(share.whole), share.is_on_all ? 0 : rank * bytes(own), bytes(own)});
      padding -= bytes(own);
    }
    parts.parts[1].push_back({0, 0, padding});
    for (std::uint32_t layer = 0; layer < shard.num_layers; ++layer)
      parts.kinds.push_back(has_state(shard.first_layer + layer) ? 1 : 0);
    return parts;
  }

  KvLayout layout() {
    Rank& rank = ranks_.back();
    KvLayout layout{{}, rank.shard.num_heads, kStateDim, sizeof(float), kStatePlanes, kStateTokens, kStateNumBlocks};
    for (std::uint32_t layer = 0; layer < rank.shard.num_layers; ++layer) {
      const auto plane = [&](std::uint32_t which) {
        const float* const base =
            &rank.memory[layer * kStateNumBlocks * page() + std::size_t{which} * kStateTokens * kStateDim];
        constexpr std::int64_t size = sizeof(float);
        return PlaneLayout{reinterpret_cast<std::uint64_t>(base), static_cast<std::int64_t>(page()) * size,
                           kStateHeadValues * size, kStateDim * size, size};
      };
      const std::uint32_t group = has_state(rank.shard.first_layer + layer) ? 1 : 0;
      layout.layers.push_back({"layer" + std::to_string(layer), group, plane(0), plane(1)});
    }
    return layout;
  }

  /// Block i has the id 1 + i. The group of the states has only the block of the state after `end` tokens.
  static BlockTable table(std::uint32_t end) {
    const std::size_t num = (end + kStateTokens - 1) / kStateTokens;
    BlockTable table = {std::vector<BlockId>(num), std::vector<BlockId>(num, kStateNullBlock)};
    std::iota(table[0].begin(), table[0].end(), 1);
    table[1].back() = table[0].back();
    return table;
  }

  /// Calls `what(memory, value that belongs there)` for the KV of the tokens, and for the states after the last one.
  template <class What>
  void each(std::uint32_t num_tokens, std::uint32_t seed, What what) {
    for (Rank& rank : ranks_)
      for (std::uint32_t number = 0; number < rank.shard.num_layers; ++number) {
        const std::uint32_t layer = rank.shard.first_layer + number, last = num_tokens / kStateTokens;
        const std::vector<LayerPart>& parts = rank.parts.parts[rank.parts.kinds[number]];
        for (std::uint32_t block = has_state(layer) ? last : 1; block <= last; ++block) {
          const std::size_t width = rank.shard.num_heads * std::size_t{kStateHeadValues};
          float* memory = &rank.memory[(std::size_t{number} * kStateNumBlocks + block) * width];
          for (std::size_t part = 0; part < parts.size(); ++part)
            for (std::uint64_t i = 0; i < parts[part].bytes / sizeof(float); ++i) {
              const std::uint64_t place = parts[part].first / sizeof(float) + i;
              const std::uint64_t stamp = seed * 200'000 + ((block * kStateLayers + layer) * 10 + part) * 1000 + place;
              what(*memory++, parts[part].whole == 0 ? kStatePadding : static_cast<float>(stamp));
            }
        }
      }
  }

  void step(const StepInput& input = {}) {
    const std::string plan = scheduler_->build_step(input);
    for (auto& worker : workers_) ok_or_throw(worker->begin_step(plan));
    for (auto& worker : workers_) worker->load();
    for (auto& worker : workers_) {
      worker->save();
      (void)worker->take_finished_loads();
      if (const auto report = worker->take_report()) ok_or_throw(scheduler_->worker_report(*report));
    }
  }

  std::vector<Rank> ranks_;
  std::unique_ptr<SchedulerNode> scheduler_;
  std::vector<std::unique_ptr<WorkerNode>> workers_;
};

TEST(StateShapes, ReadFromEachOther) {
  TestController controller;
  const std::vector<StateShape> shapes = {{1, {4}}, {2, {4}}, {4, {4}}, {2, {1, 3}}, {1, {2, 2}}};
  for (const StateShape& from : shapes) {
    StateNode prefiller(controller.endpoint(), "prefill", from);
    const auto prompt = tokens(30, 1000);
    const HandoffSource source = prefiller.prefill("p", prompt, 1);
    for (const StateShape& to : shapes) {
      StateNode decoder(controller.endpoint(), "decode", to);
      // Fills all slots, so that what is pulled comes into slots with other content.
      for (int i = 0; i < 3; ++i) decoder.prefill("own " + std::to_string(i), tokens(30, 2000 + 100 * i), 2, false);
      const StateNode::Loaded loaded = decoder.load("d", prompt, source, 1);
      const std::string what = to.name() + " from " + from.name();
      EXPECT_EQ(loaded.tokens, 24u) << what;
      EXPECT_GT(loaded.values, 3u * 2 * kStateHeads * kStateHeadValues + 2u * 400) << what;
      EXPECT_EQ(loaded.wrong, 0u) << what;
      const bool is_alike = to.tp == from.tp && to.stages == from.stages;
      EXPECT_EQ(loaded.padding, is_alike ? 2 * (128 - 32 * to.tp) : 0) << what;  // the same page, or cleared
      EXPECT_EQ(decoder.metric("pull_failures_total"), 0) << what;
    }
  }
}

}  // namespace
}  // namespace kvferry
