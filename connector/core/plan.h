// What crosses from the scheduler half to the worker half with a step (StepPlan), and back (WorkerReport).
//
// Order inside a step, on every rank: saves_before (blocks of preempted and finished requests, before anything can
// overwrite them), loads (before the forward), the forward, saves_after. All of it is done when the step is, so no
// engine block is read or written by kvferry outside the step whose plan names it: that is fenced-reuse.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/base/ids.h"
#include "transport/base/wire.h"

namespace kvferry {

/// One chunk's place in the pool of every rank. A slot's generation grows at each reuse: an old reference is told
/// apart.
struct ChunkRef {
  std::uint32_t slot = 0;
  std::uint64_t generation = 0;
  auto operator<=>(const ChunkRef&) const = default;
  KVFERRY_FIELDS(slot, generation);
};

/// Tokens [first_token, first_token + num_tokens) counted from the job's first block, to be packed as one chunk.
struct SaveItem {
  ChunkRef chunk;
  std::uint32_t first_token = 0;
  std::uint32_t num_tokens = 0;
  std::uint64_t push = 0;  // it goes to another node layer by layer (push_wire.h); 0: it does not
  std::uint32_t push_index = 0;
  KVFERRY_FIELDS(chunk, first_token, num_tokens, push, push_index);
};

struct SaveJob {
  std::string request_id;
  std::vector<std::vector<BlockId>> block_ids;  // [KV group][block], only the blocks the items touch; see kNoBlock
  std::vector<SaveItem> items;
  KVFERRY_FIELDS(request_id, block_ids, items);
};

/// Tokens [skip_tokens, skip_tokens + num_tokens) of a chunk of chunk_tokens tokens, to be unpacked at first_token.
struct LoadItem {
  ChunkRef chunk;
  std::vector<std::uint64_t> checksums;  // [rank], of the whole chunk
  std::uint32_t chunk_tokens = 0;
  std::uint32_t skip_tokens = 0;
  std::uint32_t first_token = 0;  // counted from the job's first block
  std::uint32_t num_tokens = 0;
  KVFERRY_FIELDS(chunk, checksums, chunk_tokens, skip_tokens, first_token, num_tokens);
};

struct LoadJob {
  std::string request_id;
  std::uint32_t attempt = 0;
  std::vector<std::vector<BlockId>> block_ids;  // [KV group][block], from the block that holds the first loaded token
  std::vector<LoadItem> items;
  bool is_async = false;  // the engine waits for a word that it is done, and takes all of it or nothing
  KVFERRY_FIELDS(request_id, attempt, block_ids, items, is_async);
};

struct StepPlan {
  std::uint64_t step = 0;  // 1, 2, 3 ... per scheduler
  std::vector<SaveJob> saves_before;
  std::vector<LoadJob> loads;
  std::vector<SaveJob> saves_after;
  bool empty() const { return saves_before.empty() && loads.empty() && saves_after.empty(); }
  KVFERRY_FIELDS(step, saves_before, loads, saves_after);
};

struct SaveDone {
  ChunkRef chunk;
  bool ok = false;
  std::uint64_t checksum = 0;  // XXH3-64 of this rank's bytes
  KVFERRY_FIELDS(chunk, ok, checksum);
};

struct LoadDone {
  std::string request_id;
  std::uint32_t attempt = 0;
  std::uint32_t tokens_loaded = 0;
  std::vector<ChunkRef> corrupt;  // chunks whose generation or checksum did not match; never attended
  KVFERRY_FIELDS(request_id, attempt, tokens_loaded, corrupt);
};

/// One rank's account of the steps up to and including `step`.
struct WorkerReport {
  std::uint32_t rank = 0;
  std::uint64_t step = 0;
  std::vector<SaveDone> saves;
  std::vector<LoadDone> loads;
  KVFERRY_FIELDS(rank, step, saves, loads);
};

}  // namespace kvferry
