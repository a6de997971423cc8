// What two nodes say to each other about chunks: a lease makes a holder keep chunks still while they are read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "connector/core/plan.h"
#include "transport/base/chunk_key.h"
#include "transport/base/shard_map.h"

namespace kvferry {

struct LeaseRequest {
  std::string fingerprint;  // readable; the holder refuses another model's request with a sentence
  std::vector<ChunkKey> keys;
  std::string handoff_request;     // the holder's request whose hand-off this lease ends; empty: none
  std::vector<Shard> shards = {};  // [rank] of the asker; empty: an older version, which asks nodes of its own shape
  KVFERRY_FIELDS(fingerprint, keys, handoff_request, shards);
};

struct LeasedChunk {
  std::uint32_t index = 0;  // in LeaseRequest::keys
  ChunkRef chunk;           // in the holder's pool
  std::uint32_t num_tokens = 0;
  std::vector<std::uint64_t> checksums;                        // [rank]
  std::uint32_t window_from = 0;                               // as in ChunkMeta
  std::vector<std::vector<std::uint64_t>> run_checksums = {};  // [asker's rank][run], where its shape is another
  KVFERRY_FIELDS(index, chunk, num_tokens, checksums, window_from, run_checksums);
};

struct LeaseReply {
  std::uint64_t lease = 0;  // 0: nothing was leased
  std::string refused;      // why, when the holder refuses altogether
  std::vector<LeasedChunk> chunks;
  KVFERRY_FIELDS(lease, refused, chunks);
};

/// One chunk on its way from a holder's slot to a slot of ours.
struct PullItem {
  ChunkRef remote;
  ChunkRef local;
  std::uint32_t num_tokens = 0;
  std::vector<std::uint64_t> checksums;  // [rank]; empty: the holder's shape is another, the ranks will tell
  std::vector<std::vector<std::uint64_t>> run_checksums = {};  // [rank][run], in that case
  KVFERRY_FIELDS(remote, local, num_tokens, checksums, run_checksums);
};

}  // namespace kvferry
