// A small, true model of vLLM's v1 engine around a SchedulerCore: running requests first, preemption of the last one
// when no block is free, chunked prefill, prefix caching, sync or async scheduling, and the order in which vLLM calls a
// connector (vllm/v1/core/sched/scheduler.py, 0.32). The workers check every KV cell that is attended to.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "connector/core/scheduler_core.h"
#include "sim_blocks.h"
#include "sim_worker.h"

namespace kvferry::sim {

struct EngineConfig {
  std::uint32_t num_blocks = 7;  // id 0 is the null block
  std::uint32_t token_budget = 256;
  std::uint32_t max_running = 8;
  bool prefix_caching = true;
  bool uncached_first = false;  // see Blocks
  bool async = false;           // plan N + 1 is built before the outputs and the report of step N arrive
  WorkerFaults faults;
  std::uint64_t seed = 1;
};

struct RequestSpec {
  std::string id;
  std::vector<std::int32_t> prompt;
  std::uint32_t max_tokens = 1;
  bool stops = false;  // at a stop token
  std::string extras;
  bool handoff = false;
  std::optional<HandoffSource> source;
};

/// What a scheduler may do with a request between its look-up and its allocation.
enum class Refusal { kNone, kSkip, kBreak };

class MiniEngine {
 public:
  /// Alone: without a directory, until core().set_directory_up(true).
  MiniEngine(CoreConfig core, EngineConfig config, StampBook& book);

  void add(const RequestSpec& spec, TimeNs now);
  void abort(const std::string& id, TimeNs now);
  /// reset_prefix_cache(reset_running_requests): preempts everyone, who may all resume in the next step already.
  void preempt_all();
  /// Schedules, executes, and takes in what is due. Throws Broken, or what the check handler throws.
  void step(TimeNs now);
  /// Asked after each look-up that was answered.
  std::function<Refusal(const std::string& id)> refuse;

  SchedulerCore& core() { return core_; }
  std::vector<Worker>& workers() { return workers_; }
  std::size_t num_unfinished() const { return requests_.size(); }
  /// Everything that the step's actions were, publications checked against the workers' bytes.
  std::vector<Action> take_actions();
  const std::map<std::string, std::vector<std::int32_t>>& outputs() const { return outputs_; }
  const std::map<std::string, FinishedRequest>& finished() const { return finished_; }
  const std::vector<StepPlan>& plans() const { return plans_; }
  /// The request's block table now.
  std::vector<BlockId> table(const std::string& id) const;
  std::uint64_t num_preemptions() const { return num_preemptions_; }
  std::uint64_t num_failed_loads() const { return num_failed_loads_; }

 private:
  struct Request {
    RequestSpec spec;
    Text text;
    std::uint32_t known = 0;     // tokens that the scheduler has: prompt and outputs taken in
    std::uint32_t computed = 0;  // optimistic, as in vLLM
    std::uint32_t placeholders = 0;
    std::vector<BlockId> table;
    bool table_changed = false;
    std::uint64_t epoch = 0;  // outputs of an older one are dropped
  };
  struct Scheduled {
    std::string id;
    std::uint64_t epoch = 0;
    std::vector<BlockId> table;
    bool samples = false;
    bool garbage = false;
    std::int32_t output = 0;
  };
  struct InFlight {
    std::vector<Scheduled> scheduled;
    std::vector<WorkerReport> reports;
    std::set<BlockId> bad_blocks;
  };

  void schedule_running(StepInput& input, std::uint32_t& budget);
  void schedule_waiting(StepInput& input, std::uint32_t& budget, TimeNs now);
  bool grow(Request& request, std::span<const BlockId> hit, std::uint32_t total);
  void preempt(const std::string& id);
  bool has_output_coming(const Request& request) const;
  void tell_tokens(const Request& request);
  void execute(const StepPlan& plan, const StepInput& input);
  void take_in(InFlight step, TimeNs now);
  void recover(const InFlight& step);
  void finish(const std::string& id, bool aborted, TimeNs now);

  EngineConfig config_;
  std::uint32_t block_tokens_;
  SchedulerCore core_;
  StampBook& book_;
  Blocks blocks_;
  std::vector<Worker> workers_;
  std::map<std::string, Request> requests_;
  std::vector<std::string> running_;
  std::deque<std::string> waiting_;
  std::vector<RequestId> preempted_;  // since the last step
  std::deque<InFlight> in_flight_;
  std::map<std::string, std::vector<std::int32_t>> outputs_;
  std::map<std::string, FinishedRequest> finished_;
  std::vector<StepPlan> plans_;
  std::uint64_t num_preemptions_ = 0;
  std::uint64_t num_failed_loads_ = 0;
};

}  // namespace kvferry::sim
