// A small, true model of vLLM's v1 engine around a SchedulerCore: running requests first, preemption of the last one
// when no block is free, chunked prefill, prefix caching, speculative tokens, sync or async scheduling, and the order
// in which vLLM calls a connector (vllm/v1/core/sched/scheduler.py, 0.32). The workers check every KV cell that is
// attended to, and promises_check.h judges the core after every step.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "connector/core/scheduler/scheduler_core.h"
#include "promises_check.h"
#include "sim_blocks.h"
#include "sim_worker.h"
#include "tally.h"

namespace kvferry::sim {

struct EngineConfig {
  std::uint32_t num_blocks = 7;  // id 0 is the null block
  std::uint32_t token_budget = 256;
  std::uint32_t max_running = 8;
  bool prefix_caching = true;
  bool uncached_first = false;   // see Blocks
  bool async = false;            // plan N + 1 is built before the outputs and the report of step N arrive
  bool tells_late = false;       // tokens and blocks as the connector does: only what is asked for and what is new
  bool reserves_whole = false;   // admits nobody who would not fit as a whole: vLLM's default
  bool delivers = false;         // requires_kv_delivery: a producer's, drops what a preempted one still says
  bool fails_requests = false;   // kv_load_failure_policy: fail instead of recompute
  std::uint32_t num_drafts = 0;  // speculative tokens of a decode step
  double accepts_draft = 0.6;    // of each, after all before it
  double asks_again = 0;         // a lookup is repeated at once
  WorkerFaults faults;
  std::uint64_t seed = 1;
};

struct RequestSpec {
  std::string id;
  std::vector<std::int32_t> prompt;
  std::uint32_t max_tokens = 1;
  bool stops = false;  // at a stop token
  bool cacheable = true;
  std::string extras;
  bool handoff = false;
  std::optional<HandoffSource> source;
  std::optional<std::string> push_to;
};

/// What vLLM's scheduler may do with a request between its lookup and its allocation, none of which it tells.
enum class Exit {
  kNone,
  kEncoderPending,    // skipped: an encoder's output is on its way
  kPrefillsDeferred,  // the rest of the queue waits for a later step
  kDraftsPadded,      // a decode padded to its drafts is over the budget
  kUnchunked,         // over the budget, and prefills may not be cut
  kAlignedSplit,      // nothing is left of the chunk after alignment
  kEncoderBudget,     // spent
  kNoBlocks,          // allocate_slots returns None
  kAnswerDropped,     // allocated, but without the external tokens (a longer local tail, prompt logprobs)
  kAnswerTrimmed,     // allocated with a part of them
};

/// How a request left the engine.
enum class End { kDone, kAborted, kFailed };

class MiniEngine {
 public:
  /// Alone: without a directory, until core().set_directory_up(true).
  /// shards: [rank]; none: as many as the core has ranks, each with a KV head of its own.
  MiniEngine(CoreConfig core, EngineConfig config, StampBook& book, std::vector<Shard> shards = {});

  void add(const RequestSpec& spec, TimeNs now);
  void abort(const std::string& id, TimeNs now);
  /// reset_prefix_cache(reset_running_requests): preempts everyone, who may all resume in the next step already.
  void preempt_all();
  /// reset_prefix_cache() of an engine that may be busy: vLLM does nothing then.
  void reset_idle_cache();
  /// Sleep and wake: the KV memory is gone, whoever ran is preempted, all caches are emptied.
  void sleep();
  /// Schedules, executes, and takes in what is due. Throws Broken, or what the check handler throws.
  void step(TimeNs now);
  /// Asked after each lookup that was answered.
  std::function<Exit(const std::string& id)> refuse;
  /// Shown each step as the core is told of it.
  std::function<void(const StepInput& input)> on_step;
  /// Told of each chunk whose save has ended without it.
  std::function<void(const ChunkKey& chunk)> on_save_failed;
  /// Told of each request that leaves, with all it said.
  std::function<void(const std::string& id, End end, const std::vector<std::int32_t>& output)> on_end;

  SchedulerCore& core() { return core_; }
  const SchedulerCore& core() const { return core_; }
  std::vector<Worker>& workers() { return workers_; }
  std::size_t num_unfinished() const { return requests_.size(); }
  /// Checks what the core has published since the last call against the workers' bytes. Call after each event that may
  /// publish a chunk, before another event can evict it.
  void check_published();
  /// Everything that the core's actions were, publications checked.
  std::vector<Action> take_actions();
  const std::map<std::string, std::vector<std::int32_t>>& outputs() const { return outputs_; }
  const std::map<std::string, FinishedRequest>& finished() const { return finished_; }
  void erase_finished(const std::string& id) { finished_.erase(id); }
  /// When a request of this id was allocated blocks for the first time.
  TimeNs first_admitted(const std::string& id) const { return first_admitted_.at(id); }
  const std::vector<StepPlan>& plans() const { return plans_; }
  /// The request's blocks of the first KV group now.
  std::vector<BlockId> table(const std::string& id) const;
  std::uint64_t num_preemptions() const { return tally_.preemptions; }
  /// What happened here, the core's counters included.
  Tally tally() const;
  /// Throws Broken unless nothing is held, written or waited for. Call when every deadline has passed.
  void check_idle() const;

 private:
  struct Request {
    RequestSpec spec;
    Text text;                   // goes on after the end, for drafts
    std::uint32_t end = 0;       // tokens when it is done
    std::uint32_t known = 0;     // tokens that the scheduler has: prompt and outputs taken in
    std::uint32_t sampled = 0;   // tokens that the worker has: known and those whose output is on its way
    std::uint32_t computed = 0;  // optimistic, as in vLLM
    std::uint32_t placeholders = 0;
    std::uint32_t drafts = 0;  // offered for the next step
    BlockTable table;
    BlockTable executed_table;      // as of the last step that it was in
    bool is_admitted = false;       // in this step: its whole table is told
    std::uint32_t blocks_told = 0;  // of each group
    std::uint64_t epoch = 0;        // outputs of an older one are dropped
    std::uint64_t preemptions = 0;  // outputs of before one are taken in, but take nothing back
    std::uint32_t loaded_from = 0, loaded_to = 0;
    std::map<std::uint32_t, ReportedLoad> reported_loads;  // by attempt
    enum class Wait { kNew, kPending, kRefused, kPreempted } wait = Wait::kNew;
    std::optional<TimeNs> pending_since;
    bool running = false;
    /// Of an asynchronous load: under way, or what came of it, until the request is scheduled.
    enum class Load { kNone, kUnderWay, kDone, kFailed } load = Load::kNone;
  };
  struct Scheduled {
    std::string id;
    std::uint64_t epoch = 0;
    std::uint64_t preemptions = 0;
    BlockTable table;
    std::uint32_t num = 0;
    std::uint32_t rejected = 0;
    bool garbage = false;
    std::vector<std::int32_t> outputs;
  };
  /// A load that the engine waits for, told apart from one of a later request with the same id.
  struct AsyncLoad {
    std::string id;
    std::uint64_t epoch = 0;
    bool ok = true;
  };
  /// What a request had when it lost its blocks.
  struct LostBlocks {
    BlockTable table;
    std::uint32_t computed = 0;
    std::uint32_t known = 0;
  };
  struct InFlight {
    StepPlan plan;
    std::vector<AsyncLoad> async_loads;
    std::vector<Scheduled> scheduled;
    std::vector<WorkerReport> reports;
    std::set<BlockId> bad_blocks;
  };

  std::uint32_t most(const Request& request) const {
    return static_cast<std::uint32_t>(request.spec.prompt.size()) + request.spec.max_tokens;
  }
  std::uint32_t in_flight(const Request& request) const;
  std::uint32_t split(const Request& request, std::uint32_t from, std::uint32_t num) const;
  void schedule_running(StepInput& input, std::uint32_t& budget);
  void schedule_waiting(StepInput& input, std::uint32_t& budget, TimeNs now);
  enum class Next { kGoOn, kSkip, kWait };  // kWait: the whole queue
  Next schedule_one_waiting(const std::string& id, StepInput& input, std::uint32_t& budget, TimeNs now);
  Next admit_async(Request& request, const BlockTable& hit, std::uint32_t num_local, std::uint32_t external,
                   TimeNs now);
  void take_loaded(Request& request);
  bool is_given_up(const std::string& id, std::uint32_t& external, Next& next);
  std::uint32_t reserved_blocks() const;
  std::optional<Answer> lookup(Request& request, std::uint32_t num_local, TimeNs now);
  bool grow(Request& request, const BlockTable& hit, std::uint32_t total, std::uint32_t computed);
  void cache_blocks(Request& request, std::uint32_t total, std::uint32_t computed);
  void preempt(std::string id);
  bool has_output_coming(const Request& request) const;
  void tell_tokens(const Request& request);
  void tell_step(StepInput& input);
  void execute(StepPlan plan, const StepInput& input);
  ForwardItem forward_item(Request& request, const ScheduledRequest& scheduled, Scheduled& out);
  void check_saves(const StepPlan& plan, const StepInput& input);
  void check_published(const ChunkMeta& chunk);
  std::uint32_t truly_computed(const Request& request) const;
  void take_in(InFlight step, TimeNs now);
  void tell_failed_saves(const WorkerReport& report) const;
  void take_in_output(const Scheduled& scheduled, TimeNs now);
  std::set<std::string> affected_by(std::set<BlockId>& bad, const InFlight& step) const;
  void handle_bad_blocks(const InFlight& step, TimeNs now);
  void take_in_loads(const InFlight& step);
  void finish(std::string id, End end, TimeNs now);

  EngineConfig config_;
  std::uint32_t block_tokens_;
  SchedulerCore core_;
  PromisesCheck promises_;
  StampBook& book_;
  Blocks blocks_;
  std::vector<Worker> workers_;
  std::map<std::string, Request> requests_;
  std::vector<std::string> running_;
  std::deque<std::string> waiting_;
  std::deque<std::string> holding_;                // wait with blocks, for a load or after one; come first
  std::map<std::uint64_t, BlockTable> held_back_;  // of who was aborted while it was loading, by epoch
  std::vector<RequestId> preempted_;               // since the last step
  std::map<std::string, LostBlocks> lost_;         // by request, since the last plan
  std::vector<Action> actions_;                    // taken from the core, publications checked
  std::deque<InFlight> in_flight_;
  std::vector<AdmittedLoad> admitted_;  // in this step
  std::set<std::string> first_timers_;  // admitted in this step, and never before
  std::vector<RequestId> told_;         // in this order in the last step; first-timers came after them
  std::map<std::string, std::vector<std::int32_t>> outputs_;
  std::map<std::string, FinishedRequest> finished_;
  std::map<std::string, TimeNs> first_admitted_;
  std::vector<StepPlan> plans_;
  std::uint32_t checkpoint_alignment_;
  std::mt19937_64 rng_;
  Tally tally_;
  std::uint64_t loaded_tokens_ = 0;  // that all ranks have reported
  std::uint64_t last_epoch_ = 0;     // an id may come again while an output of its former self is on its way
};

}  // namespace kvferry::sim
