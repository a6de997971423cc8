// The scheduler core's state of requests, and of its loads, pulls, leases, pins and replications.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "connector/core/flight_recorder.h"
#include "connector/core/peer_wire.h"
#include "connector/core/pool/chunk_pool.h"
#include "connector/core/scheduler/events.h"
#include "connector/core/scheduler/progress.h"
#include "connector/core/token_chain.h"
#include "transport/base/clock.h"
#include "transport/base/ids.h"

namespace kvferry {

/// The longest prefix of a request that is in the pool.
struct Coverage {
  std::vector<ChunkRef> chunks;  // the prefix's chunks in the pool, in order
  std::uint32_t tokens = 0;
  bool growing = false;  // true if the next chunk is being written, so that a later lookup may find more
};

/// A lookup that was answered since the last step was planned, and whose request has got no blocks since.
struct OpenLookup {
  /// Number of the request's tokens, without its last one, that the pool has or, for a preparation, may still be
  /// receiving. With windows fewer may be usable.
  std::uint32_t hit = 0;
  std::uint32_t num_local = 0;
  std::uint32_t num_external = 0;
  std::vector<ChunkRef> chunks;
  PinId pin;
  std::uint64_t num_purges = 0;  // SchedulerCore::Purge::num_of_engine at this lookup
};

/// A fetch copies chunks from other nodes into the pool. It requests a lease from the handoff source, then from one
/// holder of the directory after another, and pulls the leased chunks, until a deadline.
struct Fetch {
  std::uint64_t id = 0;
  enum class Stage : std::uint8_t { kDirectory, kLease, kPull } stage = Stage::kDirectory;
  TimeNs started = 0;
  TimeNs try_deadline = 0;
  bool asked_source = false;
  bool asked_again = false;  // true if the source was asked once more, since it had chunks in frames only
  bool asked_directory = false;
  std::vector<HolderOffer> offers;  // holders that were not asked yet
  std::string endpoint;             // endpoint of the holder that is being asked
  std::string member;               // HolderOffer::member of that holder
  std::vector<ChunkMeta> wanted;    // chunks requested from the holder `endpoint`
  std::uint64_t pull = 0;
};

struct RequestState {
  /// Moves the tokens out of `from`, because a prompt may have many thousands of tokens.
  RequestState(NewRequest& from, const ChunkKey& root, std::uint32_t chunk_tokens, Progress& own_progress)
      : progress(own_progress),
        id(from.id),
        num_prompt_tokens(from.num_prompt_tokens),
        chain(root, chunk_tokens, from.items, tenant_of(from.cache_salt)),
        source(from.source) {
    progress.request = this;
    cacheable = from.cacheable;
    handoff = from.handoff;
    prepares = from.prepares;
    chain.append(std::move(from.tokens));
  }

  Progress& progress;
  // The next fields refer to those of `progress`.
  std::uint32_t& computed = progress.computed;
  std::uint32_t& saved = progress.saved;
  std::uint32_t& window_end = progress.window_end;
  std::uint32_t& step_end = progress.step_end;
  std::uint32_t& computes_until = progress.computes_until;
  bool& running = progress.running;
  bool& cacheable = progress.cacheable;
  bool& handoff = progress.handoff;

  RequestId id;
  std::uint32_t checkpoint = 0;  // number of tokens before the last step's checkpoint (core_config.h); 0: none
  std::uint32_t num_prompt_tokens;
  BlockTable blocks;  // the request's block table after the last step that changed it

  TokenChain chain;
  std::optional<HandoffSource> source;

  // The next fields are about the request's attempts at admission and its fetches.
  Attempt attempt;  // number of the latest attempt, from 1
  bool attempt_open = false;
  TimeNs wait_deadline = 0;
  std::optional<OpenLookup> open_lookup;
  std::optional<Fetch> fetch;
  bool fetched = false;      // true if a fetch was started since the last attempt ended
  bool source_left = false;  // true if the handoff source was not asked for some chunks, which were being written
  std::vector<ReleaseLease> kept_leases;  // the handoff source's; it unpins the prompt once one is released
  TimeNs next_fetch_at = 0;
  TimeNs fetch_ns = 0;

  // The next two fields are valid while the request has blocks.
  enum class AsyncLoad : std::uint8_t { kNone, kInProgress, kDone } async_load = AsyncLoad::kNone;
  std::uint64_t admitted_in = 0;  // the step of the last admission

  Givers givers;                      // givers of all KV with which the request was admitted so far
  bool prepares = false;              // as in NewRequest
  bool is_delivered = false;          // true if the prompt was pushed, so that no handoff pin is needed
  std::optional<ChunkRef> last_tail;  // slot in which the request's newest tail was saved or found
  std::uint32_t last_tail_end = 0;    // the token at which last_tail ends
  std::uint32_t preemptions = 0;
  std::uint32_t failed_loads = 0;
  // True if the request must be recomputed instead of loaded, because nothing runs or loads: no blocks would become
  // free for the load.
  bool skip_external_until_admitted = false;
  /// Number of tokens whose KV the request has after its last asynchronous load into a device's memory. 0: there was no
  /// such load, or the request had computed more tokens when it was preempted.
  std::uint32_t loaded_end = 0;
  /// True if the request had computed no token after its last load when it was preempted. Such a request is recomputed
  /// instead of loaded, until it has computed more tokens than were loaded. Otherwise two requests whose blocks don't
  /// fit at once would preempt each other for ever, because a request that is being loaded can't be preempted.
  bool was_loaded_in_vain = false;
  bool is_recomputed() const { return skip_external_until_admitted || was_loaded_in_vain; }
  std::uint64_t yield_in_step = 0;  // the step in which the lookup stays pending, so that vLLM tries other requests
  std::vector<Admission> admissions;

  // The next fields serve the flight recorder.
  std::uint64_t record = 0;  // the request's number in the flight recorder
  /// What was recorded since the arrival or last admission: neither kWaits nor kAnswered, only kWaits, or both.
  enum class Wait : std::uint8_t { kNew, kPending, kAnswered } wait = Wait::kNew;
  Cause cause = Cause::kNone;      // why the next admission will lack KV, as far as this is known
  std::uint64_t cause_event = 0;   // number of the event with the cause; 0: none
  bool pool_was_full = false;      // true if a save found no slot
  std::uint32_t causes_seen = 0;   // bit c is set if blame() has recorded cause c since the last admission
  std::uint32_t known_tokens = 0;  // number of tokens that this node or the handoff source has computed before
  std::uint32_t kept_tokens = 0;   // number of tokens whose save was tried before the last preemption
};

/// A load that at least one rank has not reported yet.
struct PendingLoad {
  PinId pin;
  std::set<std::uint32_t> ranks_done;
  Admission admission;  // the admission; its `loaded` is the minimum over the ranks so far
  bool found_corrupt = false;
  std::uint64_t record = 0;  // the request's number in the flight recorder
  TimeNs began = 0;
  bool is_prepared = false;  // true for the load of a preparation
  bool is_verified = true;   // false for a preparation's load until StepPlan::loads has it, with all checksums
};

/// A pull that a fetch or a replication started.
struct FetchPull {
  RequestId request;  // id of the request whose fetch needs the pull; empty: a replication or an announced push does
  std::string endpoint;
  std::uint64_t lease = 0;
  std::vector<PullItem> items;
  TimeNs started_at = 0;
  std::uint32_t ranks_done = 0;
  bool has_failed = false;            // true if some rank received no chunk
  std::vector<bool> lost{};           // [item] true if some rank did not receive the chunk
  std::uint64_t record = 0;           // the request's number in the flight recorder
  LifeEvent event{};                  // what the flight recorder will get about this pull
  bool is_announced = false;          // true if an announced push needs the pull
  std::uint32_t ranks_in_frames = 0;  // ranks that pulled chunks from frame to frame, and none past frames

  /// Returns true if some rank did not receive a chunk that the holder did not have in its slots yet.
  bool has_lost_frames() const {
    for (std::size_t i = 0; i < lost.size(); ++i)
      if (lost[i] && items[i].lacks_slots) return true;
    return false;
  }
};

/// A ReplicateOrder that has not ended. Its chunks are copied in pieces, one piece at a time; each piece needs one
/// lease and one pull.
struct Replication {
  std::string endpoint;
  std::deque<ChunkMeta> remaining;
  TimeNs deadline = 0;
  std::string member;            // ReplicateOrder::member
  std::vector<ChunkMeta> piece;  // the chunks of the piece in progress; empty if no piece is in progress
  std::uint64_t fetch = 0;       // the piece's RequestLease::fetch
  std::uint64_t pull = 0;        // the piece's StartPull::pull; 0 until the lease is answered
  TimeNs try_deadline = 0;
};

}  // namespace kvferry
