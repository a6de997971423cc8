// An engine without a model, in this process: KV memory of a few blocks, a real scheduler node, a real worker node.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "connector/runtime/scheduler/scheduler_node.h"
#include "connector/runtime/worker/worker_node.h"
#include "controller/server/server.h"
#include "tests/connector/runtime/or_throw.h"
#include "tests/device/sim_packer.h"
#include "transport/base/net/host_port.h"

namespace kvferry {

inline std::vector<std::int32_t> tokens(std::uint32_t count, std::int32_t first = 100) {
  std::vector<std::int32_t> made(count);
  std::iota(made.begin(), made.end(), first);
  return made;
}

/// `prompt` must live until the node has the request.
inline NewRequest new_request(const std::string& id, const std::vector<std::int32_t>& prompt) {
  NewRequest made;
  made.id = RequestId{id};
  made.tokens = prompt;
  made.num_prompt_tokens = static_cast<std::uint32_t>(prompt.size());
  return made;
}

/// Looks a request up until it is answered, with a step of the engine after each lookup that is not.
template <class Step>
Answer answered_lookup(SchedulerNode& scheduler, const RequestId& id, std::uint32_t num_local, Step step) {
  const SteadyClock clock;
  const TimeNs deadline = clock.now() + 20 * kSecond;
  while (clock.now() < deadline) {
    const Answer answer = scheduler.lookup(id, num_local);
    if (!answer.pending) return answer;
    step();
  }
  throw std::runtime_error("the lookup of " + id.value + " stayed unanswered");
}

/// A real controller on a thread of its own.
class TestController {
 public:
  explicit TestController(const std::string& bind = "tcp://127.0.0.1:0", const std::string& key_file = "");
  ~TestController();
  const std::string& endpoint() const { return server_->endpoint(); }

 private:
  SteadyClock clock_;
  std::unique_ptr<controller::Server> server_;
  std::thread thread_;
};

inline const std::vector<BlockId> kSomeBlocks = {3, 9, 4, 12, 7, 20, 8}, kOtherBlocks = {1, 2, 30, 6, 5, 11, 10};

/// A node whose blocks, of fp32, are a device's memory if there is a device. Everything that accesses the blocks is
/// then work in the device's default stream.
class TestNode {
 public:
  static constexpr std::uint32_t kBlockTokens = 4, kNumBlocks = 32, kHeads = 2, kDim = 8, kLayers = 3;

  TestNode(const std::string& controller, const std::string& engine_id, const std::string& model = "toy",
           const std::string& more_config = "", std::shared_ptr<SimDevice> device = nullptr,
           const std::string& role = "kv_both", ElementType chunk_type = ElementType::kFp32,
           const std::string& conversion = "");
  ~TestNode();

  /// Returns the address at which other nodes reach this node.
  std::string endpoint() const { return "tcp://" + net::to_text({scheduler->host(), scheduler->port()}); }
  /// Writes KV whose values say where they belong: a function of (seed, layer, plane, head, token, dim).
  void compute(const std::vector<BlockId>& blocks, std::uint32_t from, std::uint32_t to, float seed);
  /// Returns the number of tokens in [from, to) whose KV differs from what compute() would have written, rounded to the
  /// type of chunks.
  std::uint32_t wrong_tokens(const std::vector<BlockId>& blocks, std::uint32_t from, std::uint32_t to, float seed);
  void wipe();
  bool loads_async() const { return device_ != nullptr; }

  /// Runs one engine step: plan, copies, report. `between` replaces the forward pass.
  template <class Forward>
  void step(const StepInput& input, Forward between) {
    ok_or_throw(worker->begin_step(scheduler->build_step(input)));
    worker->load();
    between();
    worker->save();
    for (WorkerNode::FinishedLoad& load : worker->take_finished_loads()) finished_loads.push_back(std::move(load));
    if (const auto report = worker->take_report()) ok_or_throw(scheduler->worker_report(*report));
  }
  void step() {
    step({}, [] {});
  }
  /// Repeats the lookup until the answer is no longer "ask again". Between lookups it runs steps, as an engine would.
  std::uint32_t lookup(const std::string& id, std::uint32_t num_local = 0);
  /// Runs steps without work as long as an engine would do so.
  void settle() {
    while (scheduler->has_unreported_saves() || scheduler->has_unreported_loads()) step();
  }

  std::unique_ptr<SchedulerNode> scheduler;
  std::unique_ptr<WorkerNode> worker;
  std::vector<WorkerNode::FinishedLoad> finished_loads;

 private:
  float& cell(BlockId block, std::uint32_t row, std::uint32_t layer, std::uint32_t plane, std::uint32_t head,
              std::uint32_t dim);
  void run(std::function<void()> work);
  void sync();
  void compute_now(const std::vector<BlockId>& blocks, std::uint32_t from, std::uint32_t to, float seed);
  std::shared_ptr<SimDevice> device_;
  std::vector<float> memory_;
  ElementType chunk_type_;  // bf16 or fp32
};

/// Admits the request, loads all KV that is found into kOtherBlocks, and checks every token. Returns the number of
/// loaded tokens.
std::uint32_t load(TestNode& node, const NewRequest& made, float seed);

}  // namespace kvferry
