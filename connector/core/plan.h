// Messages between the scheduler connector and the worker connectors. The scheduler connector sends a StepPlan with
// each step; a worker connector that has results sends a WorkerReport after a step.
//
// Each rank executes a step in this order: saves_before (blocks of preempted and finished requests, before they are
// overwritten), loads, the forward pass, saves_after. In host memory all four end within the step, so kvferry reads and
// writes an engine block only in the step whose plan names that block. Only the blocks of a job in `ahead` are written
// in later steps too, until a plan has the job in `loads` or `abandoned`. In a device's memory a save reads its blocks
// before any later work of the engine's stream, and an asynchronous load may outlast the step: the engine keeps the
// load's blocks until a report names the load. This keeps the promise fenced-reuse for blocks: no block is reused
// before every copy from or to it has ended.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/base/ids.h"
#include "transport/base/wire.h"

namespace kvferry {

/// A chunk's slot in the pool of every rank. The slot's generation grows at each reuse, so that references to an
/// earlier chunk no longer match.
struct ChunkRef {
  std::uint32_t slot = 0;
  std::uint64_t generation = 0;
  auto operator<=>(const ChunkRef&) const = default;
  KVFERRY_FIELDS(slot, generation);
};

/// Packs tokens [first_token, first_token + num_tokens), counted from the job's first block, into one chunk.
struct SaveItem {
  ChunkRef chunk;
  std::uint32_t first_token = 0;
  std::uint32_t num_tokens = 0;
  std::uint64_t push = 0;  // the push that sends the chunk to another node (push_wire.h); 0: none
  std::uint32_t push_index = 0;
  KVFERRY_FIELDS(chunk, first_token, num_tokens, push, push_index);
};

struct SaveJob {
  std::string request_id;
  std::vector<std::vector<BlockId>> block_ids;  // [KV group][block] blocks of the items' tokens; kNoBlock: not saved
  std::vector<SaveItem> items;
  KVFERRY_FIELDS(request_id, block_ids, items);
};

/// Unpacks tokens [skip_tokens, skip_tokens + num_tokens) of a chunk into the job's blocks, from first_token on.
struct LoadItem {
  ChunkRef chunk;
  std::vector<std::uint64_t> checksums;  // [rank] checksum of all the bytes that the rank has of the chunk
  std::uint32_t chunk_tokens = 0;        // number of tokens in the chunk
  std::uint32_t skip_tokens = 0;
  std::uint32_t first_token = 0;  // index of the item's first token, counted from the job's first block
  std::uint32_t num_tokens = 0;
  KVFERRY_FIELDS(chunk, checksums, chunk_tokens, skip_tokens, first_token, num_tokens);
};

struct LoadJob {
  std::string request_id;
  std::uint32_t attempt = 0;
  /// [KV group][block] The blocks of the tokens to load. The first blocks of all groups begin at the same token, at or
  /// before the first token to load. kNoBlock: nothing is loaded into the block.
  std::vector<std::vector<BlockId>> block_ids;
  std::vector<LoadItem> items;
  /// True if the engine schedules the request only after the load, and uses the load only if all tokens were loaded.
  bool is_async = false;
  KVFERRY_FIELDS(request_id, attempt, block_ids, items, is_async);
};

struct StepPlan {
  std::uint64_t step = 0;  // number of the step; each scheduler counts its steps from 1
  std::vector<SaveJob> saves_before;
  std::vector<LoadJob> loads;
  std::vector<SaveJob> saves_after;
  /// Loads without checksums, of chunks that may still be incomplete. A rank may unpack what has arrived, and
  /// reports nothing. This plan or a later one has the same job in `loads`, with the checksums, or in `abandoned`.
  std::vector<LoadJob> ahead = {};
  std::vector<LoadJob> abandoned = {};  // jobs of abandoned preparations: the ranks report them as failed
  bool empty() const {
    return saves_before.empty() && loads.empty() && saves_after.empty() && ahead.empty() && abandoned.empty();
  }
  KVFERRY_FIELDS(step, saves_before, loads, saves_after, ahead, abandoned);
};

struct SaveDone {
  ChunkRef chunk;
  bool ok = false;
  std::uint64_t checksum = 0;  // chunk_checksum() of this rank's bytes
  /// True if the chunk is complete in a frame of GPU memory, and is still being copied to its slot. The rank reports
  /// the chunk once more when that copy has ended.
  bool is_in_frame = false;
  KVFERRY_FIELDS(chunk, ok, checksum, is_in_frame);
};

struct LoadDone {
  std::string request_id;
  std::uint32_t attempt = 0;
  std::uint32_t tokens_loaded = 0;
  std::vector<ChunkRef> corrupt;  // chunks that were not complete in their generation, or whose checksum did not match
  KVFERRY_FIELDS(request_id, attempt, tokens_loaded, corrupt);
};

/// One rank's results since its last report, of the steps up to and including `step`.
struct WorkerReport {
  std::uint32_t rank = 0;
  std::uint64_t step = 0;
  std::vector<SaveDone> saves;  // in the order of the events; a chunk may come twice, see SaveDone::is_in_frame
  std::vector<LoadDone> loads;
  std::uint64_t accesses_refused = 0;  // growth of Transport::num_refused() since the last report
  KVFERRY_FIELDS(rank, step, saves, loads, accesses_refused);
};

}  // namespace kvferry
