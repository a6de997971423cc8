// The messages between two nodes for leases, and the items of a pull. A holder pins leased chunks while the reader
// pulls them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "connector/core/plan.h"
#include "transport/base/chunk_key.h"
#include "transport/base/shard_map.h"

namespace kvferry {

/// Stands for "in no frame" where a frame's number is expected.
constexpr std::uint32_t kNoFrame = UINT32_MAX;

struct LeaseRequest {
  /// Fingerprint of the reader's model (fingerprint.h). The holder refuses the request if its own fingerprint differs.
  std::string fingerprint;
  std::vector<ChunkKey> keys;
  /// Name of the hand-off (FinishedRequest::handoff_name) whose prompt the holder unpins once this lease is released;
  /// empty: none. A name that the holder has not given out ends no pin.
  std::string handoff;
  /// [rank] The reader's shards (shard_map.h). Empty if the reader runs an older version, which reads only from nodes
  /// with the same shards.
  std::vector<Shard> shards = {};
  bool wants_frames = false;  // true if the reader has frames of GPU memory, into which it can pull the holder's frames
  std::uint64_t push = 0;     // the push that announced these chunks to the reader (PushVerdict::kPulled); 0: none
  std::vector<ShardParts> parts = {};  // [rank] of the reader; empty: its chunks are described by `shards` alone
  /// True if chunks came from frame to frame when the reader last pulled from the holder. Such a reader may get chunks
  /// that the holder does not have in its slots yet. The holder's runtime sets it to false unless the reader can pull
  /// from frames to frames.
  bool is_sure_of_frames = false;
  KVFERRY_FIELDS(fingerprint, keys, handoff, shards, wants_frames, push, parts, is_sure_of_frames);
};

struct LeasedChunk {
  std::uint32_t index = 0;  // the chunk's place in LeaseRequest::keys
  ChunkRef chunk;           // slot in the holder's pool
  std::uint32_t num_tokens = 0;
  std::vector<std::uint64_t> checksums;  // [rank] checksum of the rank's part of the chunk
  std::uint32_t window_from = 0;         // as ChunkMeta::window_from
  /// [rank of the reader][run] Checksums of the parts of the chunk that the reader copies. Set if the two nodes' shards
  /// differ; the reader then ignores `checksums`.
  std::vector<std::vector<std::uint64_t>> run_checksums = {};
  /// [rank] The frame of GPU memory that has the chunk too and is pinned until the lease ends, or kNoFrame. Empty: in
  /// no rank's frame.
  std::vector<std::uint32_t> frames = {};
  std::uint64_t tenant = 0;                      // ChunkMeta::tenant, for a reader that has no request for the chunk
  std::vector<std::uint32_t> windows_from = {};  // [KV group] as ChunkMeta::windows_from
  /// The nodes that the chunk's KV has passed through (provenance.h); "?": unknown, as from an older holder.
  std::vector<std::string> givers = {"?"};
  bool lacks_slots = false;  // true if some rank has the chunk in its frame only; every rank's frame is then pinned
  /// True if the holder still writes the chunk into the frames. `checksums` is then empty; the reader may read the
  /// layers that PushProgress announces, and the settlement of the push has the checksums. Only if LeaseRequest::push
  /// is set.
  bool is_growing = false;
  KVFERRY_FIELDS(index, chunk, num_tokens, checksums, window_from, run_checksums, frames, tenant, windows_from, givers,
                 lacks_slots, is_growing);
};

struct LeaseReply {
  std::uint64_t lease = 0;  // number of the lease; 0: no chunk was leased
  std::string refused;      // reason if the holder refuses the whole request; empty: it does not refuse
  std::vector<LeasedChunk> chunks;
  KVFERRY_FIELDS(lease, refused, chunks);
};

/// A chunk to copy from a holder's slot, or frame, to a local slot.
struct PullItem {
  ChunkRef remote;
  ChunkRef local;
  std::uint32_t num_tokens = 0;
  /// [rank] The holder's checksums of the chunk. Empty if the holder's shards differ: this node's ranks then report the
  /// checksums of what they received.
  std::vector<std::uint64_t> checksums;
  /// [rank][run] The holder's checksum of each copied run, set instead of `checksums`. In a PullOrder only index 0 is
  /// set, for the rank that gets the order.
  std::vector<std::vector<std::uint64_t>> run_checksums = {};
  std::vector<std::uint32_t> frames = {};  // [rank] the holder's frame of GPU memory, as in LeasedChunk::frames
  bool lacks_slots = false;                // as in LeasedChunk: the chunk must not be pulled from the holder's slot
  bool is_growing = false;                 // as in LeasedChunk: PullProgress says what may be pulled
  KVFERRY_FIELDS(remote, local, num_tokens, checksums, run_checksums, frames, lacks_slots, is_growing);
};

}  // namespace kvferry
