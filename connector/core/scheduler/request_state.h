// What the scheduler core keeps of one request between its calls.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "connector/core/chunk_pool.h"
#include "connector/core/push/push_sender.h"
#include "connector/core/token_chain.h"
#include "transport/base/clock.h"
#include "transport/base/ids.h"

namespace kvferry {

using BlockTable = std::vector<std::vector<BlockId>>;  // [KV group][block]
constexpr BlockId kNullBlock = 0;                      // vLLM's placeholder for a block that a group has no use for

/// Where a prefill left this request's prompt (kv_transfer_params with do_remote_prefill).
struct HandoffSource {
  EngineId engine_id;
  std::string endpoint;
  std::string request_id;  // as the prefill side calls it
  std::uint32_t num_tokens = 0;
};

struct NewRequest {
  RequestId id;
  std::span<const std::int32_t> tokens;
  std::uint32_t num_prompt_tokens = 0;
  std::string extras;             // LoRA name, cache_salt: whatever changes all of the KV
  std::vector<TokenExtra> items;  // multimodal
  bool cacheable = true;          // false: prompt embeddings, or the prefix cache must not be read
  bool handoff = false;           // do_remote_decode: a decode worker will come for the prompt
  std::optional<HandoffSource> source;
  std::optional<PushTarget> push_to;  // with `handoff`: where the prompt goes while it is computed
};

/// One admission of a request, for reports: counted once each, never changed afterwards except `loaded`.
struct Admission {
  std::uint32_t attempt = 0;
  std::uint32_t hit = 0;    // tokens found, local and external together
  std::uint32_t local = 0;  // in the engine's own prefix cache
  std::uint32_t to_load = 0;
  std::uint32_t loaded = 0;  // once reported: a request that finishes in its admission step is gone before that
  bool resumed = false;
  std::uint32_t tokens = 0;  // that the request had then
};

struct FinishedRequest {
  bool known = false;
  bool handoff = false;  // a decode worker may come for handoff_tokens tokens
  std::uint32_t handoff_tokens = 0;
  std::uint32_t preemptions = 0;
  TimeNs fetch_ns = 0;  // spent fetching from other nodes, all attempts
  std::vector<Admission> admissions;
};

/// The longest prefix that lies in the pool.
struct Coverage {
  std::vector<ChunkRef> chunks;  // in order
  std::uint32_t tokens = 0;
  bool growing = false;  // the next chunk is being written: ask again soon
};

/// An answer that waits for its allocation, in the step in which it was given.
struct OpenLookup {
  std::uint32_t hit = 0;  // in the pool; what windows allow of it may be less
  std::uint32_t num_local = 0;
  std::uint32_t num_external = 0;
  std::vector<ChunkRef> chunks;
  PinId pin;
};

/// What another node says it holds of a request's prefix.
struct HolderOffer {
  EngineId engine_id;
  std::string endpoint;
  std::uint32_t num_full_chunks = 0;
  std::vector<ChunkMeta> tails;  // that follow those chunks
};

/// Bringing chunks from other nodes into the pool: directory -> lease -> pull, holder after holder, until a deadline.
struct Fetch {
  std::uint64_t id = 0;
  enum class Stage : std::uint8_t { kDirectory, kLease, kPull } stage = Stage::kDirectory;
  TimeNs started = 0;
  TimeNs try_deadline = 0;
  bool asked_source = false;
  bool asked_directory = false;
  std::vector<HolderOffer> offers;  // not asked yet
  EngineId engine_id;               // being asked
  std::string endpoint;
  std::vector<ChunkMeta> wanted;  // of it
  std::uint64_t pull = 0;
};

struct RequestState {
  RequestState(NewRequest&& from, const ChunkKey& root, std::uint32_t chunk_tokens)
      : id(from.id),
        num_prompt_tokens(from.num_prompt_tokens),
        cacheable(from.cacheable),
        handoff(from.handoff),
        chain(root, chunk_tokens, std::move(from.items)),
        source(std::move(from.source)) {
    chain.append(from.tokens);
  }

  // What every step looks at, side by side: hundreds of requests run at a time, and their memory is cold.
  RequestId id;
  std::uint32_t computed = 0;    // tokens whose KV is there when the planned steps are done
  std::uint32_t saved = 0;       // full chunks before this token are in the pool or were tried
  std::uint32_t window_end = 0;  // windows were cut for the token after these, when blocks were given last
  std::uint32_t num_prompt_tokens;
  bool running = false;  // it has blocks
  bool cacheable;
  bool handoff;
  BlockTable blocks;  // as of the last step that changed it

  TokenChain chain;
  std::optional<HandoffSource> source;

  // The attempt at being admitted.
  Attempt attempt;  // counts from 1
  bool attempt_open = false;
  TimeNs wait_deadline = 0;
  std::optional<OpenLookup> open_lookup;
  std::optional<Fetch> fetch;
  bool fetched = false;  // in this attempt
  TimeNs next_fetch_at = 0;
  TimeNs fetch_ns = 0;

  // While it has blocks.
  enum class AsyncLoad : std::uint8_t { kNone, kUnderWay, kDone } async_load = AsyncLoad::kNone;
  std::uint64_t admitted_in = 0;  // the step of its last admission

  bool is_delivered = false;          // its prompt was pushed: no hand-off waits for a reader
  std::optional<ChunkRef> last_tail;  // the newest tail of this request in the pool
  std::uint32_t last_tail_end = 0;    // where it ends, in tokens
  std::uint32_t preemptions = 0;
  std::uint32_t failed_loads = 0;
  bool skip_external_until_admitted = false;  // the KV that the pool has, until it is admitted: its load would never get blocks
  std::uint64_t yield_in_step = 0;  // the step in which it is not ready, so that vLLM looks at who is behind it
  std::vector<Admission> admissions;
};

}  // namespace kvferry
