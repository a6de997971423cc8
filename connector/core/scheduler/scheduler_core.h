// The scheduler connector's state machine: it decides what is loaded, saved, fetched, leased, pushed and evicted.
// Events come in as method calls; answers and actions (actions.h) go out. The class has no I/O, no clock and no
// threads: the runtime calls it under one lock, passes the time, and executes the actions that take_actions() returns.
//
// A request passes through add_request, lookup (any number of times), allocated, build_step (any number of times) and
// finished; a preemption leads back to lookup. A lookup counts only verified chunks of this node's own pool: chunks of
// other nodes are first copied into the pool, while the lookup stays pending. So once vLLM has allocated blocks, no
// network failure can affect the request. Preparations (preparation.h) are the exception.
//
// Input from other nodes and from the controller is checked on arrival. Only whether a chunk's length fits its key is
// checked later, when a request has the chunk's tokens. Wrong input is dropped. The promises (promises.h) are only
// about this node's own state.
//
// Over 200 lines, because all events of the engine, of the network and of the controller enter here.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "connector/core/actions.h"
#include "connector/core/core_config.h"
#include "connector/core/counters.h"
#include "connector/core/flight_recorder.h"
#include "connector/core/peer_wire.h"
#include "connector/core/plan.h"
#include "connector/core/pool/chunk_pool.h"
#include "connector/core/pool/provenance.h"
#include "connector/core/push/announced_pushes.h"
#include "connector/core/push/push_receiver.h"
#include "connector/core/push/push_sender.h"
#include "connector/core/scheduler/events.h"
#include "connector/core/scheduler/frame_holders.h"
#include "connector/core/scheduler/peer_holds.h"
#include "connector/core/scheduler/preparation.h"
#include "connector/core/scheduler/request_state.h"
#include "connector/core/scheduler/suspect_nodes.h"
#include "transport/base/clock.h"

namespace kvferry {

class SchedulerCore {
 public:
  explicit SchedulerCore(CoreConfig config);
  SchedulerCore(const SchedulerCore&) = delete;  // not copyable, because the parts of a core refer to each other

  // ---- events of the engine; unknown request ids are ignored, since vLLM may abort a request at any time ----
  void add_request(NewRequest request, TimeNs now);
  bool knows(const RequestId& id) const { return requests_.contains(id); }
  /// Truncates the request's tokens to the first `keep`, then appends the new ones.
  void update_tokens(const RequestId& id, std::uint32_t keep, std::span<const std::int32_t> new_tokens);
  std::uint32_t num_tokens(const RequestId& id) const;
  /// Returns a handle for StepInput. A handle of an unknown request, or of one that has ended, is ignored.
  RequestHandle handle_of(const RequestId& id) const;
  /// vLLM's get_num_new_matched_tokens: returns the number of tokens after num_local that can be loaded from the pool.
  Answer lookup(const RequestId& id, std::uint32_t num_local, TimeNs now);
  /// vLLM's update_state_after_alloc, with the request's whole block table. vLLM calls it again with num_external = 0
  /// when an asynchronous load has ended.
  void allocated(const RequestId& id, std::uint32_t num_external, const BlockTable& blocks, TimeNs now);
  /// vLLM's build_connector_meta: ends lookups whose allocation failed, and plans the step's saves and loads. The
  /// caller must have updated the tokens of preempted requests; the tokens of scheduled requests are taken from
  /// `tokens`.
  StepPlan build_step(const StepInput& input, TimeNs now, const TokenSource& tokens = {});
  /// vLLM's request_finished: unless the request was aborted, plans its remaining saves for the start of the next step,
  /// before the blocks can be reused.
  FinishedRequest finished(const RequestId& id, std::uint32_t num_computed, const BlockTable& blocks, bool aborted,
                           TimeNs now);
  void worker_report(const WorkerReport& report, TimeNs now);
  bool loads_async() const { return config_.loads_async(); }
  /// Returns true if some rank has not reported a planned load.
  bool has_unreported_loads() const { return !loads_.empty(); }
  /// vLLM's reset_cache, called between two steps: later lookups find no chunk that is in the pool now or whose save is
  /// planned now.
  void reset_cache();

  // ---- events of the network; late and unknown ids are ignored, but not by pull_done() and slot_written(): these are
  // called exactly once for each rank and pull, or rank and chunk ----
  void directory_answered(std::uint64_t fetch, std::vector<HolderOffer> offers, TimeNs now);
  void lease_answered(std::uint64_t fetch, const std::string& endpoint, const LeaseReply& reply, TimeNs now);
  /// One rank's outcome: ok[i] belongs to item i of the pull. checksums[i] is this rank's checksum of item i; it is
  /// used if the item has no PullItem::checksums, because the holder's shards differ. in_frames[i] is true if the rank
  /// still copies item i to its slot; an empty vector stands for none.
  void pull_done(std::uint64_t pull, std::uint32_t rank, const std::vector<bool>& ok, TimeNs now,
                 const std::vector<std::uint64_t>& checksums = {}, const TransferEnd& end = {},
                 const std::vector<bool>& in_frames = {});
  /// One rank's copy of a pulled chunk from a frame to its slot has ended. Follows pull_done() once for each item that
  /// `in_frames` names. Until then the chunk is loaded from the frame, and offered only to nodes that read frames.
  void slot_written(ChunkRef chunk, std::uint32_t rank, bool ok, TimeNs now);
  LeaseReply lease_requested(const std::string& from, const LeaseRequest& request, TimeNs now);
  void lease_released(std::uint64_t lease);
  /// Returns true if lease_requested() would lease the chunk in this slot now.
  bool can_lease(const LeaseRequest& request, const ChunkPool::Slot& slot) const {
    return slot.is_readable(request.is_sure_of_frames) || is_growing(request, slot);
  }

  // ---- events of pushes (push_wire.h): first the prefill side's, then the decode side's ----
  /// Returns true if this push was offered to the node at `endpoint` and the node has not answered yet.
  bool awaits_push_answer(std::uint64_t push, const std::string& endpoint) const {
    return sender_.awaits_answer(push, endpoint);
  }
  void push_answered(std::uint64_t push, const std::string& endpoint, const PushReply& reply, TimeNs now);
  void layers_saved(const LayersSaved& saved) { sender_.layers_saved(saved); }
  void chunk_push_ended(const PushOutcome& outcome, TimeNs now) {
    now_ = now;
    sender_.chunk_push_ended(outcome);
  }
  /// The runtime must execute GrantSlots before it sends the reply. `member`: name of the member whose key the sender
  /// used; empty: none. `push`: the sender's number of the push.
  PushReply push_offered(const std::string& from, const PushOffer& offer, TimeNs now, const std::string& member = {},
                         std::uint64_t push = 0);
  void push_grant_failed(std::uint64_t reservation, std::span<const std::uint32_t> indices) {
    receiver_.grant_failed(reservation, indices);
  }
  void push_settled(const PushSettlement& settlement, TimeNs now);
  void push_progressed(const PushProgress& progress, TimeNs now);
  void push_revoked(const Revocation& answer, TimeNs now);

  // ---- orders of the controller; none can corrupt an answer or fill the pool with pinned chunks ----
  /// Pins those of `keys` that are in the pool, for at most `ttl`, until half of the pool is pinned for the controller.
  /// The pins of orders with the same id add up.
  void pin_ordered(std::uint64_t id, std::span<const ChunkKey> keys, TimeNs ttl, TimeNs now);
  void unpin_ordered(std::uint64_t id);
  /// Evicts those of `keys` that are in the pool. The slot of a pinned chunk becomes free when its last pin ends.
  void evict_ordered(std::span<const ChunkKey> keys);
  void replicate_ordered(ReplicateOrder order, TimeNs now);
  /// Drops all chunks that `giver` (a node's endpoint, or "member:NAME") gave, directly or through others, those that
  /// were computed from them, and those of unknown givers; drops every chunk if `giver` is this node or its member.
  /// Chunks that are being written are dropped when the write has ended. For a day, or until admit_ordered(), no KV of
  /// `giver` is accepted. No more KV is saved of requests that attend to its KV. An order with the id of the last purge
  /// of `giver` changes nothing.
  void purge_ordered(std::uint64_t id, const std::string& giver, TimeNs now);
  /// Accepts KV of `giver` again.
  void admit_ordered(const std::string& giver) { provenance_.admit(giver); }

  /// While `up` is false, because the controller is unreachable, no fetch queries the directory.
  void set_directory_up(bool up) { directory_up_ = up; }

  /// Handles deadlines. Must be called at least every 100 ms.
  void tick(TimeNs now);
  std::vector<Action> take_actions() { return std::exchange(actions_, {}); }
  /// Returns all chunks that other nodes may read, to be published to the controller.
  std::vector<ChunkMeta> snapshot() const;

  struct Purge {
    std::uint64_t id = 0;             // id of the last order to purge; 0: there was none
    std::uint64_t num_chunks = 0;     // number of chunks that were dropped because of this order
    std::uint64_t num_bytes = 0;      // size of the KV in these chunks
    std::uint64_t num_of_engine = 0;  // number of purges since this node's start that affect the engine's blocks
  };
  /// When num_of_engine grows, the engine must stop using all blocks that it cached before.
  const Purge& last_purge() const { return purge_; }
  const Provenance& provenance() const { return provenance_; }

  const FlightRecorder& recorder() const { return recorder_; }
  const CoreConfig& config() const { return config_; }
  // ---- data for the engine's KV events; none is collected before track_pool() ----
  void track_pool() { pool_.track_changes(); }
  PoolChanges take_pool_changes() { return pool_.take_changes(); }
  /// Returns the chunks that were planned to be saved or were found for a request since the last call, each once. Must
  /// be called in each step, and when a request has finished.
  std::vector<NamedChunk> take_named_chunks() { return std::exchange(named_, {}); }
  const CoreCounters& counters() const { return counters_; }
  const ChunkPool& pool() const { return pool_; }
  std::size_t num_requests() const { return requests_.size(); }
  std::size_t num_fetches() const { return fetches_.size(); }
  std::size_t num_pulls() const { return pulls_.size(); }
  std::size_t num_open_lookups() const { return open_lookups_.size(); }
  std::size_t num_replications() const { return replications_.size(); }
  std::size_t num_controller_pinned() const { return num_controller_pinned_; }
  std::size_t num_pushes() const { return sender_.num_pushes(); }
  /// Returns the number of pushes from other nodes for which slots are reserved or announcements are expected.
  std::size_t num_reservations() const { return receiver_.num_reservations() + announced_.size(); }
  std::size_t num_reserved_chunks() const { return receiver_.num_reserved_chunks(); }
  std::size_t num_preparations() const { return preparations_.size(); }
  /// Returns true if a preparation has begun whose chunks are not all here yet.
  bool awaits_prepared_chunks() const;

 private:
  static constexpr std::size_t kKnownKeys = 32'768;
  // These functions are defined in scheduler_core.cpp, and the last two in scheduler_peers.cpp.
  RequestState* find(const RequestId& id);
  std::string pin_handoff(RequestState& request, std::uint32_t num_tokens, TimeNs now);
  Handoffs::iterator find_handoff(const std::string& name);
  void unpin_handoff(Handoffs::iterator handoff);
  void publish(ChunkRef chunk);
  void name_chunk(const RequestState& request, ChunkRef chunk, std::uint32_t first_token);
  void announce_evictions();
  void erase_ended_leases();
  bool is_growing(const LeaseRequest& request, const ChunkPool::Slot& slot) const;
  const ChunkPool::Slot* find_chunk(const ChunkKey& key, std::uint32_t num_tokens);
  // These functions are defined in scheduler_admission.cpp.
  Coverage cover(RequestState& request);
  std::uint32_t unit() const { return config_.whole_blocks ? block_tokens_ : 1; }  // hits and chunks end at multiples
  std::uint32_t reusable(std::uint32_t num_tokens) const;
  bool could_grow(const RequestState& request, const Coverage& coverage, std::uint32_t num_local) const;
  bool lacks_state(const ChunkPool::Slot& slot) const {
    return config_.keeps_state && slot.state == ChunkPool::State::kReady && slot.meta.window_from > 0;
  }
  std::uint32_t fit_windows(std::span<const ChunkRef> chunks, std::uint32_t hit, std::uint32_t num_local) const;
  std::uint32_t window_start(std::size_t group, std::uint32_t end) const;
  bool has_windows(const ChunkMeta& chunk, std::uint32_t chunk_start, std::uint32_t num_local, std::uint32_t end) const;
  bool is_load_async(const RequestState& request) const { return loads_async() || request.prepares; }
  LoadJob plan_load(const RequestState& request, std::uint32_t num_external, const BlockTable& blocks) const;
  Answer answer(RequestState& request, const Coverage& coverage, std::uint32_t num_local, TimeNs now);
  void end_attempt(RequestState& request);
  // These functions are defined in scheduler_prepare.cpp.
  Answer lookup_preparation(RequestState& request, std::uint32_t num_local, TimeNs now);
  std::optional<Answer> wait_for_preparation(RequestState& request, std::uint32_t num_local);
  void begin_preparation(const RequestState& request, LoadJob job, PendingLoad load);
  void advance_preparations(bool lacks_blocks, TimeNs now, StepPlan& plan);
  bool is_lost(const Preparation& preparation, TimeNs now) const;
  void end_preparation(Preparation& preparation, TimeNs now, StepPlan& plan);
  // These functions are defined in scheduler_steps.cpp.
  static void change_blocks(RequestState& request, const BlockChange& change);
  void advance(Progress& progress, std::uint32_t num_computed, std::uint32_t num_scheduled, const TokenSource& tokens,
               StepPlan& plan);
  std::uint32_t checkpoint_of(const RequestState& request) const;
  void release_blocks(RequestState& request);
  static void load_ended(RequestState& request, const PendingLoad& load);
  void invalidate_planned_saves();
  // These functions are defined in scheduler_saves.cpp.
  std::uint32_t plan_full_chunks(RequestState& request, std::vector<SaveJob>& jobs);
  void plan_running_saves(RequestState& request, StepPlan& plan);
  bool lacks_tokens(const RequestState& request) const;
  void plan_leftover_saves(RequestState& request, bool tail);
  std::optional<SaveItem> plan_chunk(RequestState& request, std::uint32_t chunk, std::uint32_t num_tokens);
  bool has_blocks(const RequestState& request, std::uint32_t first_token, std::uint32_t end) const;
  std::uint32_t window_end_of_chunk(const RequestState& request, std::uint32_t end) const;
  std::vector<BlockId> blocks_of(const BlockTable& table, std::size_t group, std::uint32_t first_token,
                                 std::uint32_t end_token, std::uint32_t window_end) const;
  void append_save(const RequestState& request, const SaveItem& item, std::vector<SaveJob>& jobs);
  // These functions are defined in scheduler_fetch.cpp, and those about handoff sources in scheduler_sources.cpp.
  void start_fetch(RequestState& request, TimeNs now);
  void advance_fetch(RequestState& request, TimeNs now);
  bool ask_directory(RequestState& request, TimeNs now);
  std::vector<ChunkMeta> missing_from(RequestState& request, const HolderOffer& offer);
  void end_fetch(RequestState& request, TimeNs now);
  void suspect(const std::string& endpoint, TimeNs now);
  bool has_writing(std::span<const ChunkMeta> chunks) const;
  std::vector<ChunkMeta> handed_off(RequestState& request) const;
  bool is_source_next(RequestState& request) const;
  void ask_sources_again(TimeNs now);
  void release_lease(RequestState* request, ReleaseLease lease);
  void drop_source(RequestState& request);
  const StartPull* start_pull(const RequestId& request, const std::string& endpoint, const std::string& member,
                              std::span<const ChunkMeta> wanted, const LeaseReply& reply, TimeNs now,
                              bool is_announced = false);
  // These functions are defined in scheduler_announced.cpp.
  void advance_announced(TimeNs now);
  void settle_announced(AnnouncedPushes::Push& push, const SettledChunk& chunk);
  bool settle_growing(const AnnouncedPushes::Growing& growing, const SettledChunk& chunk);
  void growing_answered(AnnouncedPushes::Push& push, std::span<const std::uint32_t> indices, std::uint64_t pull);
  void announced_lease_answered(AnnouncedPushes::Push& push, const LeaseReply& reply, TimeNs now);
  void tick_announced(TimeNs now);
  // These functions are defined in scheduler_record.cpp.
  LifeEvent& record(const RequestState& request, LifeKind kind, Cause cause = Cause::kNone);
  void note_cause(RequestState& request, Cause cause);
  void blame(RequestState& request, Cause cause, std::string_view peer = {}, std::string_view note = {});
  void blame_wait(RequestState& request);
  Cause cause_of_rest(const RequestState& request, std::uint32_t num_here) const;
  void record_arrival(RequestState& request, const Coverage& coverage, const NewRequest& from);
  void record_wait(RequestState& request);
  void record_answer(RequestState& request, const OpenLookup& open);
  void record_admission(RequestState& request, std::uint32_t num_local, std::uint32_t num_external);
  void record_preemption(RequestState& request);
  void record_load(RequestState* request, const PendingLoad& load);
  void record_pull(FetchPull& pull, const std::vector<bool>& ok, const TransferEnd& end);
  // These functions are defined in scheduler_orders.cpp.
  void advance_replications(TimeNs now);
  bool is_replication_lease(std::uint64_t fetch) const;
  void replication_lease_answered(const LeaseReply& reply, TimeNs now);
  void end_replication_piece(std::uint64_t pull, TimeNs now);
  void tick_orders(TimeNs now);
  // These functions are defined in scheduler_purge.cpp.
  void note_givers(RequestState& request, std::span<const ChunkRef> chunks, std::uint32_t num_local, std::uint32_t end,
                   std::uint64_t num_purges);
  void end_sharing_if_purged(RequestState& request);

  CoreConfig config_;
  const ChunkKey plain_root_ = root_key(config_.fingerprint, "");  // root key of requests without extras
  ChunkPool pool_;
  std::vector<Action> actions_;
  std::vector<NamedChunk> named_;
  CoreCounters counters_;
  Provenance provenance_;
  Purge purge_;
  FlightRecorder recorder_{config_.num_recorded_events, config_.num_recorded_requests};
  SecretNumbers numbers_{config_.secret};
  PushSender sender_;
  AnnouncedPushes announced_;
  PushReceiver receiver_;
  TimeNs now_ = 0;  // time of the event that is being handled; set by handlers that record events or publish chunks
  std::unordered_map<RequestId, RequestState> requests_;
  ProgressTable progress_;  // the records of requests_
  KnownKeys known_keys_{kKnownKeys};
  std::set<RequestId> open_lookups_;            // requests whose lookup was answered, but that have got no blocks since
  std::map<std::uint64_t, RequestId> fetches_;  // [fetch id] the request that started the fetch
  std::map<std::uint64_t, FetchPull> pulls_;
  std::map<std::pair<std::string, std::uint32_t>, PendingLoad> loads_;  // [request, attempt] the attempt's load
  std::vector<Preparation> preparations_;  // preparations whose load at least one rank has not reported yet
  Handoffs handoffs_;
  std::map<std::uint64_t, GrantedLease> leases_;  // [lease number] leases granted to other nodes
  std::size_t num_leased_chunks_ = 0;             // chunks in leases_; a chunk with two leases counts twice
  std::map<std::uint64_t, std::vector<ControllerPin>> controller_pins_;  // [id of the order]
  std::size_t num_controller_pinned_ = 0;  // chunks in controller_pins_; a chunk with two pins counts twice
  std::deque<Replication> replications_;   // only the first replication is in progress
  SuspectNodes suspects_{config_.load_timeout};
  FrameHolders frame_holders_;
  std::vector<SaveJob> saves_before_next_;  // saves of preempted and finished requests
  std::vector<LoadJob> loads_next_;
  std::set<ChunkRef> saving_;  // slots of planned saves that some rank has not reported
  std::uint64_t step_ = 0;     // number of the last built plan
  std::uint64_t last_id_ = 0;
  bool has_windows_ = false;         // true if a KV group has a window
  bool has_unlike_windows_ = false;  // true if the KV groups with windows are not all equal (KvGroup)
  std::uint32_t block_tokens_ = 1;   // the least common multiple of all groups' block sizes
  bool directory_up_ = true;
  bool has_ended_writes_ = false;  // true if a pull or push may have ended since the last ask_sources_again()
};

}  // namespace kvferry
