// The settings of the scheduler core (connector/core/scheduler), which the runtime derives from the connector's
// settings and from vLLM's configuration.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/base/clock.h"

namespace kvferry {

/// A KV group: layers that share a block table.
struct KvGroup {
  std::uint32_t block_tokens = 16;
  /// Number of tokens that the layers attend to, including the current token; 0 means all tokens.
  std::uint32_t window = 0;
  /// True if the window does not slide: the layers attend to the tokens since the last multiple of `window` tokens
  /// (chunked local attention).
  bool window_restarts = false;
  bool operator==(const KvGroup&) const = default;
};

struct CoreConfig {
  std::string fingerprint;
  std::string endpoint = "?";  // address at which other nodes reach this node
  std::string member;          // this node's name as a member of the cluster (net::Identity); empty: it has none
  std::uint32_t chunk_tokens = 256;
  std::vector<KvGroup> groups = {{}};
  /// True if the tokens of a block can't be told apart in memory: their elements are interleaved, or they are on
  /// several ranks in turns. Chunks and tails then consist of whole blocks of all KV groups, and a hit ends at the end
  /// of such a block. chunk_tokens must be a multiple of every group's block size. Holds for all models with state.
  bool whole_blocks = false;
  /// True for models with state (Mamba, linear attention, short convolutions). A block of a KV group with a window then
  /// holds the model's state after the block's last token, if the engine kept the state there: at the end of a step, or
  /// at a checkpoint. Chunks and windows must be one block long, and a hit can end only after a block with a state.
  bool keeps_state = false;
  /// A checkpoint is a state that the engine keeps before the end of a step: at the last block boundary before the end,
  /// if the step starts at a block boundary and the two boundaries are a multiple of `checkpoint_alignment` tokens
  /// apart. 0: there are no checkpoints.
  std::uint32_t checkpoint_alignment = 0;
  bool runs_ahead = false;  // true if the engine plans a step before the previous step has a result
  bool on_device = false;   // true if the blocks are in a device's memory: loads and saves may outlast their step
  std::uint32_t num_slots = 0;
  std::uint32_t num_ranks = 1;
  /// Limit on the tokens of all preparations (scheduler/preparation.h) together. 0: this node prepares nothing.
  std::uint64_t prepared_tokens_max = 0;
  /// True if the setting chunk_dtype is in effect: this node's model or its KV has another data type than that of the
  /// nodes whose fingerprint it shares. Such a node saves no KV, because what it computes differs from what those nodes
  /// compute. Its pool has chunks that those nodes saved.
  bool only_reads = false;
  /// True if chunks for a decode node that pulls them are announced layer by layer (PushProgress); see the setting
  /// push_layers.
  bool pushes_layers = false;
  bool save_decode_cache = true;
  bool save_partial_chunks = true;
  TimeNs load_timeout = 5 * kSecond;  // limit on the time that the lookups of one attempt wait for chunks
  /// Limit on the wait for the answer of the controller or of a node that is asked for chunks, and for pushed chunks
  /// that a waiting request needs.
  TimeNs try_timeout = 1 * kSecond;
  TimeNs pull_timeout = 4 * kSecond;  // limit on the time of one pull
  TimeNs lease_ttl = 30 * kSecond;    // time after which a lease's pins end if the reader has not released the lease
  TimeNs handoff_ttl = 60 * kSecond;  // longest time that a finished prompt stays pinned for its decode worker
  TimeNs push_ttl = 60 * kSecond;     // limit on the time from a push offer to its last chunk, on both nodes
  TimeNs push_grace = 30 * kSecond;   // time that workers have to end a dropped push before its slots are unpinned
  TimeNs order_ttl_max = 24 * 3600 * kSecond;  // upper bound for each ttl of the controller's orders; ttl of a purge
  TimeNs pin_ttl = 60 * kSecond;               // limit on the time of a pin for a lookup or a load
  TimeNs tenant_idle = 600 * kSecond;          // time without a use after which a tenant has no share of the pool
  /// Shortest pause between the end of a request's fetch and its next fetch. Chunks that were not requested from the
  /// handoff source because they were being written may be fetched without a pause.
  TimeNs refetch_after = 100 * kMillisecond;
  std::uint64_t chunk_bytes = 0;             // size of a full chunk in all ranks together, for reports
  std::uint32_t num_recorded_events = 128;   // number of the latest events that the flight recorder keeps
  std::uint32_t num_recorded_requests = 32;  // number of the latest requests that the flight recorder keeps
  /// Random bytes, new at each start, from which the numbers of leases, reservations, pushes and hand-offs are derived.
  std::string secret;

  std::uint64_t bytes_of(std::uint64_t num_tokens) const { return num_tokens * chunk_bytes / chunk_tokens; }
  /// Returns true if every request is scheduled only after its load has ended. If false, this holds only for
  /// preparations, and other requests are loaded within a step. If a load within a step fails, vLLM must recompute from
  /// the first bad block on. vLLM can't do that with several KV groups, with windows (earlier blocks are gone), or if
  /// it has already planned later steps. A load into a device's memory has no result before the step's end.
  bool loads_async() const { return runs_ahead || on_device || groups.size() > 1 || groups[0].window > 0; }
};

}  // namespace kvferry
