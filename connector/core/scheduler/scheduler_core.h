// The scheduler half of the connector: decides what is loaded, saved, fetched, leased and evicted. A pure state
// machine: events in (method calls with the time), answers and actions out. No I/O, no clock, no threads: the runtime
// calls it under one lock and carries out take_actions().
//
// The life of a request here: add_request -> lookup (any number of times) -> allocated -> build_step ... -> finished;
// a preemption leads from build_step back to lookup. A look-up answers only what lies verified in this node's own pool;
// what other nodes hold is fetched into the pool first, while the answer is "ask again". So nothing can fail on the
// network after vLLM has given out blocks.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "connector/core/chunk_pool.h"
#include "connector/core/orders.h"
#include "connector/core/peer_wire.h"
#include "connector/core/plan.h"
#include "connector/core/push/push_receiver.h"
#include "connector/core/push/push_sender.h"
#include "connector/core/scheduler/request_state.h"
#include "transport/base/clock.h"

namespace kvferry {

struct CoreConfig {
  std::string fingerprint;
  std::uint32_t chunk_tokens = 256;
  std::uint32_t block_tokens = 16;
  /// [KV group] How many tokens its layers attend to, the current one included; 0: all. Groups with a window have the
  /// same one.
  std::vector<std::uint32_t> windows = {0};
  bool runs_ahead = false;  // the engine plans a step before it has heard how the last one went
  std::uint32_t num_slots = 0;
  std::uint32_t num_ranks = 1;
  bool save_decode_cache = true;
  bool save_partial_chunks = true;
  TimeNs load_timeout = 5 * kSecond;          // the longest a look-up may stay unanswered
  TimeNs try_timeout = 1 * kSecond;           // for one directory or holder to answer
  TimeNs pull_timeout = 4 * kSecond;          // for the bytes of one holder
  TimeNs lease_ttl = 30 * kSecond;            // a reader that died holds nothing longer than this
  TimeNs handoff_ttl = 60 * kSecond;          // a finished prefill waits this long for its decode worker
  TimeNs push_ttl = 60 * kSecond;             // from an offer to its last chunk
  TimeNs push_grace = 30 * kSecond;           // for workers to end what was given up
  TimeNs order_ttl_max = 24 * 3600 * kSecond;  // whatever the controller asks
  TimeNs pin_ttl = 60 * kSecond;              // look-ups and loads of our own; ended by the next step in practice
  TimeNs refetch_after = 100 * kMillisecond;  // what nobody had a moment ago isn't asked for again at once
  std::uint64_t first_lease = 1;              // another one at each start: leases of a past life are strangers

  /// Loads are part of the step of their admission, unless a failed one could not be mended there: vLLM goes back to
  /// the first bad block, and of a window what lies before it is gone. And what it has planned on top of a failed load
  /// it carries out, and tells what that says.
  bool loads_async() const { return runs_ahead || windows.size() > 1 || windows[0] > 0; }
};

// ---- actions ----
struct QueryDirectory {
  std::uint64_t fetch = 0;
  std::vector<ChunkKey> keys;
  std::vector<ChunkKey> tail_groups;
};
struct RequestLease {
  std::uint64_t fetch = 0;
  EngineId engine_id;
  std::string endpoint;
  LeaseRequest request;
};
struct ReleaseLease {
  std::string endpoint;
  std::uint64_t lease = 0;
};
struct StartPull {
  std::uint64_t pull = 0;
  EngineId engine_id;
  std::string endpoint;
  std::uint64_t lease = 0;
  TimeNs deadline = 0;
  std::vector<PullItem> items;
};
struct PublishChunks {
  std::vector<ChunkMeta> chunks;
};
struct AnnounceEvictions {
  std::vector<ChunkKey> keys;
};
/// A sentence for the log; `warning` where an operator should look.
struct LogLine {
  std::string text;
  bool warning = false;
};
using Action = std::variant<QueryDirectory, RequestLease, ReleaseLease, StartPull, PublishChunks, AnnounceEvictions,
                            OfferPush, StartPush, SettlePush, DropPush, GrantSlots, RevokeSlots, LogLine>;

// ---- events ----
struct ScheduledRequest {
  RequestId id;
  std::uint32_t num_computed = 0;       // before this step
  std::uint32_t num_scheduled = 0;      // in this step
  std::optional<BlockTable> block_ids;  // when it was given a new one: the whole table
  BlockTable new_block_ids = {};        // else what was added to each group's
  bool same_place = false;              // known to have stood at this place in the step before: its id is not compared
};
struct StepInput {
  std::vector<ScheduledRequest> scheduled;
  std::vector<RequestId> preempted;
};
/// The request's tokens from `known` on: asked for when they are needed, which is once a chunk, not once a step.
using TokenSource = std::function<std::vector<std::int32_t>(const RequestId& id, std::uint32_t known)>;

struct Answer {
  bool pending = false;  // ask again in a later step
  std::uint32_t num_external = 0;
  bool is_async = false;
};

/// Monotone; the names are those of the metrics.
struct CoreCounters {
  std::uint64_t lookups = 0, lookup_hits = 0, hit_tokens = 0, loads = 0, loaded_tokens = 0, load_failures = 0,
                resumed = 0, resumed_hit_tokens = 0, saved_chunks = 0, saved_tokens = 0, save_failures = 0,
                pool_full = 0, pulls = 0, pulled_chunks = 0, pull_failures = 0, fetch_timeouts = 0, leases_granted = 0,
                pins_expired = 0, evicted_chunks = 0, pins_refused = 0, pushed_chunks = 0, push_failures = 0,
                received_chunks = 0;
  bool operator==(const CoreCounters&) const = default;
};

class SchedulerCore {
 public:
  explicit SchedulerCore(CoreConfig config);
  SchedulerCore(const SchedulerCore&) = delete;  // its parts refer to each other

  // ---- the engine's side; ids of requests that were never added (or left) are ignored, as vLLM may abort any time
  // ----
  void add_request(const NewRequest& request, TimeNs now);
  bool knows(const RequestId& id) const { return requests_.contains(id); }
  /// Brings the request's tokens up to date: drops those from `keep` on, then appends.
  void update_tokens(const RequestId& id, std::uint32_t keep, std::span<const std::int32_t> new_tokens);
  std::uint32_t num_tokens(const RequestId& id) const;
  /// get_num_new_matched_tokens: how many tokens after num_local this node's pool can load.
  Answer lookup(const RequestId& id, std::uint32_t num_local, TimeNs now);
  /// update_state_after_alloc, with the request's whole block table; once more with 0 when an asynchronous load is
  /// done.
  void allocated(const RequestId& id, std::uint32_t num_external, const BlockTable& blocks, TimeNs now);
  /// build_connector_meta: ends look-ups whose allocation failed, plans the step's saves and loads. Tokens of preempted
  /// requests are up to date; those of scheduled ones may be asked for.
  StepPlan build_step(const StepInput& input, TimeNs now, const TokenSource& tokens = {});
  /// request_finished: plans the save of what is not saved yet for the next step (before its blocks can be reused).
  FinishedRequest finished(const RequestId& id, std::uint32_t num_computed, const BlockTable& blocks, bool aborted,
                           TimeNs now);
  void worker_report(const WorkerReport& report, TimeNs now);
  bool loads_async() const { return config_.loads_async(); }
  /// reset_cache: no chunk of this pool, and no save planned so far, is found by a later look-up. Between two steps.
  void reset_cache();

  // ---- the network's side; late or unknown ids are ignored, except of pulls, which our own workers answer once ----
  void directory_answered(std::uint64_t fetch, std::vector<HolderOffer> offers, TimeNs now);
  void lease_answered(std::uint64_t fetch, const std::string& endpoint, const LeaseReply& reply, TimeNs now);
  /// One rank's outcome, ok[i] for item i of the pull. checksums[i]: of this rank's chunk, where the item has none
  /// since the holder's shape is another.
  void pull_done(std::uint64_t pull, std::uint32_t rank, const std::vector<bool>& ok, TimeNs now,
                 const std::vector<std::uint64_t>& checksums = {});
  LeaseReply lease_requested(const std::string& from, const LeaseRequest& request, TimeNs now);
  void lease_released(std::uint64_t lease);

  // ---- pushes (push_wire.h) ----
  /// The other node's answer to our offer.
  void push_answered(std::uint64_t push, const std::string& endpoint, const PushReply& reply, TimeNs now);
  /// What a rank of ours was given to push, once each.
  void chunk_push_ended(const PushOutcome& outcome, TimeNs now);
  /// Another node offers chunks. What is lent is told to the workers first, then to the node.
  PushReply push_offered(const std::string& from, const PushOffer& offer, TimeNs now);
  void push_grant_failed(std::uint64_t ticket, std::span<const std::uint32_t> indices, TimeNs now);
  void push_settled(const PushSettlement& settlement, TimeNs now);
  void push_revoked(const Revocation& answer, TimeNs now);

  // ---- the controller's orders (orders.h) ----
  void pin_ordered(const PinOrder& order, TimeNs now);
  void unpin_ordered(std::uint64_t id);
  /// What somebody reads goes when it is read.
  void evict_ordered(std::span<const ChunkKey> keys);
  void replicate_ordered(ReplicateOrder order, TimeNs now);

  /// Without a controller, look-ups go to the hand-off's node alone.
  void set_directory_up(bool up) { directory_up_ = up; }

  /// Deadlines: call at least every 100 ms.
  void tick(TimeNs now);
  std::vector<Action> take_actions();
  std::vector<ChunkMeta> snapshot() const;

  const CoreCounters& counters() const { return counters_; }
  const ChunkPool& pool() const { return pool_; }
  std::size_t num_requests() const { return requests_.size(); }
  std::size_t num_fetches() const { return fetching_.size(); }
  std::size_t num_open_lookups() const { return open_lookups_.size(); }
  std::size_t num_replications() const { return replications_.size(); }
  std::size_t num_controller_pinned() const { return num_controller_pinned_; }
  std::size_t num_pushes() const { return sender_.num_pushes(); }
  std::size_t num_reservations() const { return receiver_.num_reservations(); }
  std::size_t num_granted_chunks() const { return receiver_.num_granted_chunks(); }

 private:
  struct Pull {
    RequestId request;  // empty: an ordered fetch
    std::string endpoint;
    std::uint64_t lease = 0;
    std::vector<PullItem> items;
    std::uint32_t ranks_done = 0;
  };
  struct Lease {
    PinId pin;
    std::string handoff;  // the request whose hand-off it ends; empty: none
  };
  struct ControllerPin {
    PinId pin;
    std::size_t num_chunks = 0;
  };
  struct Load {
    PinId pin;
    std::set<std::uint32_t> ranks_done;
    Admission admission;  // `loaded`: fewest over the ranks so far
    bool found_corrupt = false;
  };

  RequestState* find(const RequestId& id);
  RequestState* find_scheduled(const ScheduledRequest& scheduled, std::size_t place);
  Coverage cover(RequestState& request);
  std::uint32_t fit_windows(std::span<const ChunkRef> chunks, std::uint32_t hit, std::uint32_t num_local) const;
  /// The first token that layers with a window still have, when the token after `end` tokens is next.
  std::uint32_t window_start(std::uint32_t end) const;
  LoadJob plan_load(const RequestState& request, std::uint32_t num_external, const BlockTable& blocks) const;
  Answer answer(RequestState& request, const Coverage& coverage, std::uint32_t num_local, TimeNs now);
  void end_attempt(RequestState& request);
  void release_blocks(RequestState& request);
  void pin_handoff(RequestState& request, std::uint32_t num_tokens, TimeNs now);
  static void load_ended(RequestState& request, const Load& load);

  std::uint32_t plan_full_chunks(RequestState& request, std::vector<SaveJob>& jobs);
  void plan_running_saves(RequestState& request, StepPlan& plan);
  bool lacks_tokens(const RequestState& request) const;
  void plan_leftover_saves(RequestState& request, bool tail);
  std::optional<SaveItem> plan_chunk(RequestState& request, std::uint32_t chunk, std::uint32_t num_tokens);
  bool has_blocks(const RequestState& request, std::uint32_t first_token, std::uint32_t end) const;
  std::vector<BlockId> blocks_of(const BlockTable& table, std::size_t group, std::uint32_t first_block,
                                 std::uint32_t end_block, std::uint32_t window_end) const;
  void invalidate_planned_saves();
  void append_save(const RequestState& request, const SaveItem& item, std::vector<SaveJob>& jobs);

  void start_fetch(RequestState& request, TimeNs now);
  void advance_fetch(RequestState& request, TimeNs now);
  bool ask_directory(RequestState& request, TimeNs now);
  std::vector<ChunkMeta> missing_from(RequestState& request, const HolderOffer& offer);
  void end_fetch(RequestState& request, TimeNs now);
  const StartPull* start_pull(const RequestId& request, const EngineId& engine_id, const std::string& endpoint,
                               std::span<const ChunkMeta> wanted, const LeaseReply& reply, TimeNs now);
  void advance_replications(TimeNs now);
  bool replication_lease_answered(std::uint64_t number, const LeaseReply& reply, TimeNs now);
  void end_replication_piece(TimeNs now);
  void tick_orders(TimeNs now);
  void offer_prompt(RequestState& request, PushTarget target);
  void shorten_push_deadlines(RequestState& request);
  void take_push_actions();
  void publish(ChunkRef chunk);
  void announce_evictions();

  CoreConfig config_;
  ChunkPool pool_;
  PushSender sender_;
  PushReceiver receiver_;
  TimeNs now_ = 0;  // of the event that is being handled
  std::unordered_map<RequestId, RequestState> requests_;
  std::vector<RequestState*> last_order_;  // of the last step's requests: the next step's is nearly the same
  std::set<RequestId> open_lookups_;       // answered in this step, not allocated yet
  std::set<RequestId> fetching_;
  std::map<std::uint64_t, RequestId> fetches_;  // fetch id -> request
  std::map<std::uint64_t, Pull> pulls_;
  std::map<std::pair<std::string, std::uint32_t>, Load> loads_;  // (request, attempt)
  std::map<std::string, PinId> handoffs_;                        // request -> hold on its prompt's chunks
  std::map<std::uint64_t, Lease> leases_;                        // given out, by number
  std::map<std::uint64_t, std::vector<ControllerPin>> controller_pins_;              // by the controller's number of the hold
  std::size_t num_controller_pinned_ = 0;                                     // chunks; twice where two holds keep one
  std::deque<Replication> replications_;                             // the first one is being carried out
  std::map<std::string, TimeNs> suspect_until_;                  // endpoints that did not answer
  std::vector<SaveJob> saves_before_next_;                       // of preempted and finished requests
  std::vector<LoadJob> loads_next_;
  std::set<ChunkRef> saving_;  // planned and not reported by every rank
  std::vector<Action> actions_;
  CoreCounters counters_;
  std::uint64_t step_ = 0;  // of the plan built last
  std::uint64_t last_id_ = 0;
  std::uint64_t next_lease_;
  std::uint32_t window_ = 0;  // of the groups that have one
  bool directory_up_ = true;
};

}  // namespace kvferry
