// What the engine, the workers and the controller pass to the scheduler core, and the core's answers.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "connector/core/actions.h"
#include "connector/core/flight_recorder.h"
#include "connector/core/known_keys.h"
#include "connector/core/scheduler/progress.h"
#include "connector/core/token_chain.h"
#include "transport/base/clock.h"
#include "transport/base/ids.h"
#include "transport/base/result.h"

namespace kvferry {

using BlockTable = std::vector<std::vector<BlockId>>;  // [KV group][block] id of the block
constexpr BlockId kNullBlock = 0;                      // vLLM's placeholder for a block that a KV group does not need

/// Says which prefill node keeps a request's prompt (kv_transfer_params with do_remote_prefill).
struct HandoffSource {
  std::string endpoint;  // empty: the hand-off can't be used, and `handoff` says why
  std::string handoff;   // FinishedRequest::handoff_name at the prefill node
  std::uint32_t num_tokens = 0;
  std::string member{};  // name of the member that signed the hand-off; empty: no member
};

struct NewRequest {
  RequestId id;
  std::vector<std::int32_t> tokens;
  /// [chunk] the engine's digests of the tokens up to each full chunk's end; empty if these digests do not depend on
  /// all that changes the KV (except `extras`). The last chunks may be missing.
  std::vector<EngineDigest> digests = {};
  std::uint32_t num_prompt_tokens = 0;
  std::string extras;             // part of all chunk keys: a LoRA's digest, the weights epoch, cache_salt
  std::string_view cache_salt{};  // identifies the tenant (tenant_id.h); `extras` contains it too
  std::vector<TokenExtra> items;  // the prompt's multimodal items
  /// True if the request's KV may be loaded and saved. False, for example, for prompt embeddings, which have no token
  /// ids, and for streamed sessions, which change past tokens.
  bool cacheable = true;
  bool handoff = false;  // true with do_remote_decode: a decode worker will read the prompt from this node
  std::optional<HandoffSource> source;
  /// With `handoff`: the endpoint of the decode node that receives the prompt while it is computed
  /// (kv_transfer_params.kvferry_push_to).
  std::optional<std::string> push_to;
  /// True for a preparation (preparation.h), whose load may begin before the request with the same prompt arrives.
  bool prepares = false;
  // The next fields are for the flight recorder.
  TimeNs waited = 0;    // time since the server got the request, see wait_since(); 0: unknown
  std::string trace{};  // the request's W3C trace id; a malformed id counts as empty
};

/// Returns how long ago the server got a request. `arrived_ms` and `now_ms` are milliseconds of the wall clock. Returns
/// 0, for "unknown", if `arrived_ms` is 0 or less, lies after `now_ms`, or is more than kWaitMax ago.
inline TimeNs wait_since(std::int64_t arrived_ms, std::int64_t now_ms) {
  const bool is_known = arrived_ms > 0 && arrived_ms <= now_ms && now_ms - arrived_ms <= kWaitMax / kMillisecond;
  return is_known ? (now_ms - arrived_ms) * kMillisecond : 0;
}

struct ScheduledRequest {
  RequestId id;
  std::uint32_t num_computed = 0;       // number of tokens computed before this step
  std::uint32_t num_scheduled = 0;      // number of tokens to compute in this step
  std::optional<BlockTable> block_ids;  // the request's whole new block table, if the engine replaced the old table
};
/// A scheduled request whose handle the caller has from SchedulerCore::handle_of().
struct RunningRequest {
  RequestHandle handle;
  std::uint32_t num_computed = 0;   // number of tokens computed before this step
  std::uint32_t num_scheduled = 0;  // number of tokens to compute in this step
};
struct BlockChange {
  RequestHandle handle;
  BlockTable blocks;      // [KV group] added blocks, or the whole new block table
  bool is_whole = false;  // true if `blocks` is the whole new table
};
struct StepInput {
  std::vector<ScheduledRequest> scheduled;
  std::vector<RequestId> preempted;
  std::vector<RunningRequest> running = {};     // scheduled requests that are not in `scheduled`
  std::vector<BlockChange> block_changes = {};  // changes of the block tables of requests in `running`
};
/// Returns the request's tokens from index `known` on. Called only if the core lacks tokens of a computed chunk, not in
/// each step.
using TokenSource = std::function<std::vector<std::int32_t>(const RequestId& id, std::uint32_t known)>;

/// The answer to a lookup.
struct Answer {
  bool pending = false;            // true if the engine must ask again in a later step
  std::uint32_t num_external = 0;  // number of tokens, after the local ones, that can be loaded from the pool
  bool is_async = false;           // true if the engine schedules the request only after the load has ended
  bool awaits_step = false;        // with `pending`: true if the caller must not wait for messages within the step
};

/// Record of one admission of a request, for reports. Only `loaded` changes after the admission.
struct Admission {
  std::uint32_t attempt = 0;
  std::uint32_t hit = 0;    // number of tokens found, local and external together
  std::uint32_t local = 0;  // number of tokens in the engine's own prefix cache
  std::uint32_t to_load = 0;
  std::uint32_t loaded = 0;  // 0 until the workers report; a request may finish before the workers report
  bool resumed = false;
  std::uint32_t tokens = 0;  // number of the request's tokens at this admission
};

struct FinishedRequest {
  bool known = false;
  bool handoff = false;  // true if a decode worker may read the prompt's first handoff_tokens tokens
  std::uint32_t handoff_tokens = 0;
  /// What a decode node has to name for this node to unpin the prompt early: the request's id and a secret number, so
  /// that only a node that was given the hand-off knows this name.
  std::string handoff_name;
  std::uint32_t preemptions = 0;
  TimeNs fetch_ns = 0;  // duration of all fetches that have ended
  std::vector<Admission> admissions;
};

/// How one rank's part of a pull has ended, for the flight recorder and the counters.
struct TransferEnd {
  ErrorCode code = ErrorCode::kOk;
  std::string_view what{};                               // the reason of a failure
  std::string_view path{};                               // the path that moved the bytes
  std::uint32_t limit_mb_per_s = 0;                      // measured limit of this rank's path, see LifeEvent
  TimeNs post = 0, wire = 0, unpack = 0;                 // parts of the transfer's time, see LifeEvent
  std::uint32_t num_in_frames = 0, num_past_frames = 0;  // numbers of chunks, see PullOutcome
  std::string_view host_why{};                           // why some chunk went through host memory, see PullOutcome
};

/// The controller's order to copy these chunks from the node at `endpoint` into this node's pool, in this order, within
/// `ttl`.
struct ReplicateOrder {
  std::string endpoint;
  std::vector<ChunkMeta> chunks;  // chunks to copy; num_tokens is ignored for full chunks
  TimeNs ttl = 0;
  std::string member{};  // name of the member that registered the node; empty: no member
};

/// The part of a request's prefix that a node holds, as reported by the directory or named by a handoff source.
struct HolderOffer {
  std::string endpoint;
  std::uint32_t num_full_chunks = 0;
  std::vector<ChunkMeta> tails;  // tails that follow the full chunks
  std::string member{};          // name of the member that registered the node or signed the hand-off; empty: no member
};

}  // namespace kvferry
