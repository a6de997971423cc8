// An engine of any shape without a model, in this process: ranks with KV memory of a few blocks, a real scheduler node,
// and a real worker node for each rank.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "connector/runtime/scheduler/scheduler_node.h"
#include "connector/runtime/worker/worker_node.h"

namespace kvferry {

struct NodeShape {
  std::uint32_t tp = 1;
  std::vector<std::uint32_t> stages = {4};  // number of layers in each stage
  std::uint32_t heads = 4;                  // heads of the whole model
  std::uint32_t planes = 2;                 // 1: the model has a latent instead of K and V
  std::uint32_t block_tokens = 4;
  bool heads_first = true;  // true: HND, [block][head][token][dim]; false: NHD
  std::string name() const;
};

/// A node whose KV values say where they belong, for every shape.
class ShapedNode {
 public:
  static constexpr std::uint32_t kNumBlocks = 32, kDim = 8, kChunkTokens = 8;

  ShapedNode(const std::string& controller, const std::string& engine_id, NodeShape shape);
  ~ShapedNode();

  void step(const StepInput& input = {});
  /// Prefills the prompt in one step and finishes the request. Returns where a decode node finds the prompt.
  HandoffSource prefill(const std::string& id, const std::vector<std::int32_t>& prompt, float seed);
  struct Loaded {
    std::uint32_t tokens = 0;
    std::uint32_t wrong = 0;  // number of cells whose value differs from the computed one
  };
  /// Admits the prompt, and loads all KV that is found.
  Loaded load(const std::string& id, const std::vector<std::int32_t>& prompt,
              const std::optional<HandoffSource>& source, float seed);
  double metric(const std::string& name) const { return scheduler->metrics()[name]; }
  /// Damages the pool of a rank.
  void damage(std::uint32_t rank);
  std::size_t num_ranks() const { return ranks_.size(); }

  std::unique_ptr<SchedulerNode> scheduler;
  std::vector<std::unique_ptr<WorkerNode>> workers;  // [rank]; nullptr: this rank is dead

 private:
  struct Rank {
    Shard shard;
    std::vector<float> memory;
  };
  std::size_t cell(const Rank& rank, std::uint32_t block, std::uint32_t row, std::uint32_t layer, std::uint32_t plane,
                   std::uint32_t head, std::uint32_t dim) const;
  /// Calls `what(memory cell, value that belongs there)` for all cells of the tokens.
  template <class What>
  void each(std::uint32_t num_tokens, float seed, What what);

  NodeShape shape_;
  std::string endpoint_;
  std::vector<Rank> ranks_;
  std::vector<BlockId> blocks_;
  std::vector<std::string> segments_;
};

}  // namespace kvferry
