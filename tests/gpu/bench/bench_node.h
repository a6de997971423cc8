// A node of kvferry with an engine's blocks in a GPU: real scheduler and worker, Llama-3.1-8B's cache, no model.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "connector/runtime/scheduler/scheduler_node.h"
#include "connector/runtime/worker/worker_node.h"
#include "controller/server/server.h"
#include "tests/gpu/bench/pattern_cache.h"

namespace kvferry {

/// A controller on a thread of its own.
class BenchController {
 public:
  BenchController();
  ~BenchController();
  const std::string& endpoint() const { return server_->endpoint(); }

 private:
  SteadyClock clock_;
  std::unique_ptr<controller::Server> server_;
  std::thread thread_;
};

class BenchNode {
 public:
  static constexpr std::uint32_t kChunkTokens = 256;

  /// `settings`: more members of the JSON object of settings, each after a comma.
  static Result<std::unique_ptr<BenchNode>> start(const std::string& controller, const std::string& engine_id,
                                                  const std::string& settings, std::uint32_t num_tokens_max);
  ~BenchNode();

  /// What a decode node must be told to load a prompt from this node.
  struct Prefilled {
    std::string endpoint, handoff;
    std::uint32_t num_tokens = 0;
    double saved_ms = 0;       // from the end of the forward pass until other nodes may read all chunks
    TimeNs forward_ended = 0;  // SteadyClock's time of the end of the forward pass
  };
  /// Computes a prompt, whose KV is the pattern with this seed, and saves it. Only one at a time. `push_to`: endpoint
  /// of the node to which it is pushed; empty: none. `layer_ms`: time that the forward pass takes for each layer.
  Prefilled prefill(std::uint64_t prompt, std::uint32_t num_tokens, const std::string& push_to = {}, int layer_ms = 0);

  struct Loaded {
    std::uint32_t num_tokens = 0;        // tokens that were loaded: all but the last one, if all went well
    double total_ms = 0, lookup_ms = 0;  // until the blocks have the KV, and until the node knows what it can load
    double load_ms = 0;                  // within WorkerNode::load()
    std::uint32_t num_wrong = 0;
    LifeEvent pulled;  // what the flight recorder says of the pull
  };
  /// Loads a prompt that another node has computed, and compares it with the pattern.
  Loaded load(std::uint64_t prompt, std::uint32_t num_tokens, const Prefilled& from);

  std::string endpoint() const;
  /// Waits until the node has pulled `count` chunks more than at the last call. Returns the chunks that came from frame
  /// to frame since then; fewer than `count` have come if 10 s were not enough.
  std::uint32_t wait_for_pulled(std::uint32_t count);
  std::string describe() const { return worker_->describe(); }

 private:
  explicit BenchNode(std::uint32_t num_tokens_max);
  /// Runs one step of the engine, whose forward pass does nothing but take time. Returns when that has ended.
  TimeNs step(const StepInput& input, double* load_ms = nullptr, int layer_ms = 0);
  std::uint32_t lookup(const RequestId& id, bool& is_async);

  Gpu gpu_;
  std::unique_ptr<PatternCache> cache_;
  DeviceStream stream_ = nullptr;
  std::vector<BlockId> blocks_;
  std::unique_ptr<SchedulerNode> scheduler_;
  std::unique_ptr<WorkerNode> worker_;
  std::vector<std::int32_t> tokens_;  // of the current request
  std::uint64_t events_seen_ = 0;
  double pulled_ = 0, pulled_in_frames_ = 0;  // chunks, at the last wait_for_pulled()
};

}  // namespace kvferry
