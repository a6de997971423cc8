// A small but faithful model of vLLM's v1 engine around a SchedulerCore: running requests first, preemption of the last
// request when no block is free, chunked prefill, prefix caching, speculative tokens, synchronous or asynchronous
// scheduling, and the order in which vLLM calls a connector (vllm/v1/core/sched/scheduler.py, 0.32). The workers check
// every KV cell that a request attends to. promises_check.h judges the core after every step.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "connector/core/scheduler/scheduler_core.h"
#include "promises_check.h"
#include "sim_blocks.h"
#include "sim_worker.h"
#include "tally.h"

namespace kvferry::sim {

struct EngineConfig {
  std::uint32_t num_blocks = 7;  // block 0 is the null block
  std::uint32_t token_budget = 256;
  std::uint32_t max_running = 8;
  bool prefix_caching = true;
  bool uncached_first = false;  // see Blocks
  bool async = false;           // plan N + 1 is built before the outputs and the report of step N arrive
  // passes tokens and blocks to the core as the connector does: only those that are needed and new
  bool tells_late = false;
  // admits a request only if blocks for the whole request are free, as vLLM does by default
  bool reserves_whole = false;
  // requires_kv_delivery of a producer: drops the outputs of a request that was preempted meanwhile
  bool delivers = false;
  bool fails_requests = false;   // kv_load_failure_policy is fail, not recompute
  std::uint32_t num_drafts = 0;  // number of speculative tokens in a decode step
  double accepts_draft = 0.6;    // probability that a speculative token is accepted, if all before it were
  double asks_again = 0;         // probability that a lookup is repeated at once
  WorkerFaults faults;
  std::uint64_t seed = 1;
};

struct RequestSpec {
  std::string id;
  std::vector<std::int32_t> prompt;
  std::uint32_t max_tokens = 1;
  bool stops = false;  // ends at a stop token
  bool cacheable = true;
  std::string extras;
  std::string salt;  // also in `extras`
  bool handoff = false;
  std::optional<HandoffSource> source;
  std::optional<std::string> push_to;
  bool prepares = false;  // a preparation, which its client aborts
};

/// Returns the extras of a request's chunk keys on a node whose weights were updated so many times.
std::string extras_of(const RequestSpec& spec, std::uint32_t weights);

/// What vLLM's scheduler may do with a request between its lookup and its allocation. The connector is told of none of
/// these.
enum class Exit {
  kNone,
  kEncoderPending,    // the request is skipped, because an encoder's output is not there yet
  kPrefillsDeferred,  // the rest of the queue waits for a later step
  kDraftsPadded,      // a decode that is padded to its number of drafts exceeds the budget
  kUnchunked,         // the prompt exceeds the budget, and prefills may not be cut into chunks
  kAlignedSplit,      // the chunk is empty after alignment
  kEncoderBudget,     // spent
  kNoBlocks,          // allocate_slots returns None
  kAnswerDropped,     // blocks are allocated, but not for the external tokens (a longer local tail, prompt logprobs)
  kAnswerTrimmed,     // blocks are allocated for a part of the external tokens
};

/// The reason why a request left the engine.
enum class End { kDone, kAborted, kFailed };

class MiniEngine {
 public:
  /// The engine is alone and has no directory until core().set_directory_up(true).
  ///
  /// `shards` has a shard for each rank. If it is empty, there are as many ranks as the core has, each with one KV head
  /// of its own. `parts`: of each rank of a model with states, where nodes have unlike shapes.
  MiniEngine(CoreConfig core, EngineConfig config, StampBook& book, std::vector<Shard> shards = {},
             std::vector<ShardParts> parts = {});

  void add(const RequestSpec& spec, TimeNs now);
  void abort(const std::string& id, TimeNs now);
  /// Does what reset_prefix_cache(reset_running_requests) does: preempts all requests. All of them may resume in the
  /// next step.
  void preempt_all();
  /// Does what reset_prefix_cache() does. If the engine is busy, it does nothing, like vLLM.
  void reset_idle_cache();
  /// Sleeps and wakes: the KV memory is lost, running requests are preempted, all caches are emptied.
  void sleep();
  /// Gives the model other weights. Like vLLM's reset_prefix_cache(reset_running_requests, reset_connector), preempts
  /// all running requests and empties all caches; then ends all requests for the core, like the connector. The core
  /// gets a request again, with other extras, before the request's next lookup. Does nothing while a load is under way.
  void update_weights(TimeNs now);
  /// Schedules and executes a step, then processes the outputs and reports that are due. Throws Broken, or what the
  /// check handler throws.
  void step(TimeNs now);
  /// Called after each lookup that was answered; decides what the scheduler does with the request.
  std::function<Exit(const std::string& id)> refuse;
  /// Called with the input of each step, before the core gets it.
  std::function<void(const StepInput& input)> on_step;
  /// Called for each chunk whose save failed.
  std::function<void(const ChunkKey& chunk)> on_save_failed;
  /// Called for each request that leaves the engine, with all tokens that it generated.
  std::function<void(const std::string& id, End end, const std::vector<std::int32_t>& output)> on_end;

  SchedulerCore& core() { return core_; }
  const SchedulerCore& core() const { return core_; }
  std::vector<Worker>& workers() { return workers_; }
  std::size_t num_unfinished() const { return requests_.size(); }
  /// Returns the ranks' saves that were reported in a frame since the last call. Each must be reported once more when
  /// it is in its slot.
  std::vector<std::pair<std::uint32_t, SaveDone>> take_unwritten() { return std::exchange(unwritten_, {}); }
  /// Compares the chunks that the core has published since the last call with the workers' bytes. Must be called after
  /// each event that may publish a chunk, before another event can evict it.
  void check_published();
  /// Throws Broken unless a chunk that a rank has put together from runs of parts has what its key says.
  void check_put_together(const ChunkKey& key, std::uint32_t slot, std::uint32_t rank) const;
  /// Returns the core's actions since the last call. Their published chunks are already checked.
  std::vector<Action> take_actions();
  const std::map<std::string, std::vector<std::int32_t>>& outputs() const { return outputs_; }
  const std::map<std::string, FinishedRequest>& finished() const { return finished_; }
  void erase_finished(const std::string& id) { finished_.erase(id); }
  /// Returns the time at which a request with this id first got blocks.
  TimeNs first_admitted(const std::string& id) const { return first_admitted_.at(id); }
  /// Returns how often the weights were updated, now and when the last request with this id left the engine.
  std::uint32_t weights() const { return weights_; }
  std::uint32_t weights_at_end(const std::string& id) const { return weights_at_end_.at(id); }
  /// Returns true if the weights were updated while the last request with this id was in the engine.
  bool is_rekeyed(const std::string& id) const { return rekeyed_.contains(id); }
  const std::vector<StepPlan>& plans() const { return plans_; }
  /// Returns the request's current blocks in the first KV group.
  std::vector<BlockId> table(const std::string& id) const;
  std::uint64_t num_preemptions() const { return tally_.preemptions; }
  /// Returns how often everything happened in this engine, including the core's counters.
  Tally tally() const;
  /// Throws Broken if anything is still held, written or waited for. Must be called after all deadlines have passed.
  void check_idle() const;

 private:
  struct Request {
    RequestSpec spec;
    Text text;                // continues after the end of the request, for drafts
    std::uint32_t end = 0;    // number of tokens at the end of the request
    std::uint32_t known = 0;  // number of tokens that the scheduler knows: the prompt and the processed outputs
    // number of tokens that the worker knows: `known`, and those whose output is not processed yet
    std::uint32_t sampled = 0;
    std::uint32_t computed = 0;  // counts drafts as accepted, as in vLLM
    std::uint32_t placeholders = 0;
    std::uint32_t drafts = 0;  // number of drafts that are offered for the next step
    BlockTable table;
    BlockTable executed_table;             // the table in the last step that had this request
    bool is_admitted = false;              // admitted in this step, so the core gets its whole table
    std::vector<std::size_t> blocks_told;  // [group] number of blocks that the core knows
    BlockTable blocks_added;               // blocks that the core gets in this step beside those that it knows
    std::uint64_t epoch = 0;               // outputs of an earlier epoch are dropped
    // outputs from before the last preemption are processed, but don't reduce `computed`
    std::uint64_t preemptions = 0;
    std::uint32_t loaded_from = 0, loaded_to = 0;
    std::map<std::uint32_t, ReportedLoad> reported_loads;  // keyed by attempt
    enum class Wait { kNew, kPending, kRefused, kPreempted } wait = Wait::kNew;
    std::optional<TimeNs> pending_since;
    bool running = false;
    bool has_bad_blocks = false;  // blocks of the prefix cache that it shares turned bad during its load
    bool is_dropped = false;      // the core does not know the request until its next lookup
    /// State of an asynchronous load: kUnderWay, or its result until the request is scheduled.
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
  /// A load for which the engine waits. `epoch` distinguishes it from a load of a later request with the same id.
  struct AsyncLoad {
    std::string id;
    std::uint64_t epoch = 0;
    bool ok = true;
  };
  /// The state of a request at the time when it lost its blocks.
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
  void go_on(Request& request);
  void tell_request(Request& request, TimeNs now);
  std::uint32_t in_flight(const Request& request) const;
  std::uint32_t split(const Request& request, std::uint32_t from, std::uint32_t num) const;
  void schedule_running(StepInput& input, std::uint32_t& budget);
  void schedule_waiting(StepInput& input, std::uint32_t& budget, TimeNs now);
  enum class Next { kGoOn, kSkip, kWait };  // kWait: the whole queue waits
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
  StepInput as_told(const StepInput& input);
  void execute(StepPlan plan, const StepInput& input);
  ForwardItem forward_item(Request& request, const ScheduledRequest& scheduled, Scheduled& out);
  void check_saves(const StepPlan& plan, const StepInput& input);
  void check_published(const ChunkMeta& chunk);
  std::uint32_t truly_computed(const Request& request) const;
  void take_in(InFlight step, TimeNs now);
  void take_in_saves(const InFlight& step);
  /// Returns true if a save of the request was planned whose end not all ranks have reported.
  bool has_late_save(const std::string& id) const {
    return std::ranges::any_of(late_saves_, [&](const auto& save) { return save.second.request == id; });
  }
  void tell_failed_saves(const WorkerReport& report) const;
  void take_in_output(const Scheduled& scheduled, TimeNs now);
  std::set<std::string> affected_by(std::set<BlockId>& bad, const InFlight& step) const;
  void handle_bad_blocks(const InFlight& step, TimeNs now);
  void take_in_loads(const InFlight& step);
  void finish(std::string id, End end, TimeNs now);

  EngineConfig config_;
  std::uint32_t block_tokens_;  // of the first KV group; of all groups in models with state
  bool whole_blocks_;
  SchedulerCore core_;
  PromisesCheck promises_;
  StampBook& book_;
  Blocks blocks_;
  std::vector<Worker> workers_;
  std::map<std::string, Request> requests_;
  std::vector<std::string> running_;
  std::deque<std::string> waiting_;
  std::deque<std::string> holding_;  // requests that hold blocks for a load, or after one; scheduled before waiting_
  // by epoch, the blocks of requests that were aborted while they were loading
  std::map<std::uint64_t, BlockTable> held_back_;
  std::vector<RequestId> preempted_;        // requests that were preempted since the last step
  std::map<std::string, LostBlocks> lost_;  // by request, the blocks that were lost since the last plan
  std::vector<Action> actions_;             // taken from the core; their published chunks are checked
  std::deque<InFlight> in_flight_;
  /// Saves of a step whose reports have come, but told their ends not of all ranks.
  struct LateSave {
    std::string request;
    std::size_t ranks_left = 0;
  };
  std::map<ChunkRef, LateSave> late_saves_;
  std::vector<std::pair<std::uint32_t, SaveDone>> unwritten_;
  std::vector<AdmittedLoad> admitted_;  // the loads that were admitted in this step
  struct Preparing {
    AdmittedLoad load;
    std::uint64_t epoch = 0;
  };
  std::map<std::string, Preparing> preparing_;  // by request, the loads of preparations whose end is not planned yet
  std::set<std::string> first_timers_;          // requests that were admitted in this step for the first time
  // by request, the handles of the last step's requests without those that were scheduled for the first time
  std::map<std::string, RequestHandle> handles_;
  std::map<std::string, std::vector<std::int32_t>> outputs_;
  std::map<std::string, FinishedRequest> finished_;
  std::map<std::string, TimeNs> first_admitted_;
  std::uint32_t weights_ = 0;  // number of updates
  std::map<std::string, std::uint32_t> weights_at_end_;
  std::set<std::string> rekeyed_;
  std::vector<StepPlan> plans_;
  std::uint32_t checkpoint_alignment_;
  std::mt19937_64 rng_;
  Tally tally_;
  std::uint64_t loaded_tokens_ = 0;  // tokens that all ranks have reported as loaded
  // epochs are needed because an id may be used again while an output of its former request is not processed yet
  std::uint64_t last_epoch_ = 0;
};

}  // namespace kvferry::sim
