// The messages of a push, between two nodes and between a scheduler and its workers. The prefill node offers a prompt's
// chunks when the request arrives. The decode node reserves slots for chunks that it lacks. The prefill node's workers
// write into those slots, if possible while the model runs. Settlements report which chunks are complete. Each field
// `reservation` is the id that the decode node gave to the slot reservation.
//
// Between nodes that both have frames of GPU memory nothing is written into the decode node's memory, because a grant
// of GPU memory could not be revoked. There the settlements announce the chunks that are complete, and the decode node
// pulls each of them at once (announced_pushes.h). With the setting push_layers, the prefill node also announces layers
// of chunks that it still computes (PushProgress).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "connector/core/plan.h"
#include "transport/base/chunk_key.h"
#include "transport/base/shard_map.h"

namespace kvferry {

// ---- between nodes ----
struct OfferedChunk {
  ChunkKey key;
  std::uint32_t num_tokens = 0;
  ChunkKey tail_group;  // zeros if the chunk is not a tail or belongs to no group
  KVFERRY_FIELDS(key, num_tokens, tail_group);
};

struct PushOffer {
  std::string fingerprint;
  std::uint32_t num_ranks = 0;
  /// [rank] The prefill node's shards, which its runtime sets. A decode node with other shards declines all chunks.
  std::vector<Shard> shards;
  std::vector<OfferedChunk> chunks;
  std::uint64_t tenant = 0;  // ChunkMeta::tenant of all chunks
  std::string from = "?";    // the prefill node's endpoint; "?": unknown, as from an older node
  /// True if transfers reach the frames of all ranks of the prefill node, from which the chunks can be pulled. Set by
  /// the prefill node's runtime; the decode node's runtime sets it to false if this node has no such frames.
  bool has_frames = false;
  KVFERRY_FIELDS(fingerprint, num_ranks, shards, chunks, tenant, from, has_frames);
};

/// The decode node's answer for one offered chunk.
enum class PushVerdict : std::uint8_t {
  kDeclined = 0,  // e.g. no slot is free, or the shards differ; the decode node pulls the chunk when needed
  kPresent = 1,   // the decode node's pool has the chunk, or the chunk is being written there
  kGranted = 2,   // the decode node has reserved a slot
  kPulled = 3     // the decode node pulls the chunk when a settlement says that it is complete; if has_frames
};

struct PushReply {
  std::uint64_t reservation = 0;       // id of the slot reservation, or of the announced push; 0: neither
  std::string refused;                 // the reason, if the whole offer is refused
  std::vector<std::uint8_t> verdicts;  // [offered chunk] PushVerdict; unknown values count as kDeclined
  bool takes_layers = false;           // true if the decode node understands PushProgress; false from an older node
  KVFERRY_FIELDS(reservation, refused, verdicts, takes_layers);
};

/// Announces layers of chunks (kPulled) that the prefill node still computes: the first `done` of `of` equal parts of
/// the layers of each rank (layers_of()) are in the ranks' frames, and will not change until the chunks are settled.
struct PushProgress {
  std::uint64_t reservation = 0;
  std::vector<std::uint32_t> indices;  // places of the chunks in PushOffer::chunks
  std::uint32_t done = 0, of = 0;
  KVFERRY_FIELDS(reservation, indices, done, of);
};

/// Returns how many layers the first `done` of `of` parts of a rank's layers are; `done` is at most `of`, which is not
/// 0.
inline std::uint32_t layers_of(std::uint32_t done, std::uint32_t of, std::uint32_t num_layers) {
  return static_cast<std::uint32_t>((std::uint64_t{done} * num_layers + of - 1) / of);
}

struct SettledChunk {
  std::uint32_t index = 0;  // the chunk's place in PushOffer::chunks
  bool ok = false;          // false: the chunk will not be completed
  std::uint32_t window_from = 0;
  std::vector<std::uint64_t> checksums;          // [rank] checksum of the rank's bytes
  std::vector<std::uint32_t> windows_from = {};  // [KV group] as ChunkMeta::windows_from
  std::vector<std::string> givers = {"?"};       // as LeasedChunk::givers
  KVFERRY_FIELDS(index, ok, window_from, checksums, windows_from, givers);
};

struct PushSettlement {
  std::uint64_t reservation = 0;
  std::vector<SettledChunk> chunks;
  KVFERRY_FIELDS(reservation, chunks);
};

// ---- between a scheduler and its workers ----
/// A slot that another node may write.
struct GrantedChunk {
  std::uint32_t index = 0;
  ChunkRef chunk;
  std::uint32_t num_tokens = 0;
  KVFERRY_FIELDS(index, chunk, num_tokens);
};

struct GrantOrder {
  std::uint64_t reservation = 0;
  std::vector<GrantedChunk> chunks;
  std::int64_t lasts_ns = 0;  // the grants expire after this time, also if the scheduler does not revoke them
  std::string member{};       // name of the member whose node may use the grants; empty: any node
  KVFERRY_FIELDS(reservation, chunks, lasts_ns, member);
};

/// One rank's answer to a GrantOrder: the transport's exported grants. A grant is empty if the rank could not grant
/// access to the slot.
struct GrantOutcome {
  std::uint64_t reservation = 0;
  std::uint32_t rank = 0;
  std::vector<std::string> grants;  // one grant for each of GrantOrder::chunks, in the same order
  KVFERRY_FIELDS(reservation, rank, grants);
};

struct RevokedChunk {
  std::uint32_t index = 0;
  ChunkRef chunk;
  bool ok = false;
  std::vector<std::uint64_t> checksums;  // [rank] checksum of the rank's bytes
  KVFERRY_FIELDS(index, chunk, ok, checksums);
};

/// An order to revoke the grants of these slots. Each rank answers with one or more messages of the same fields
/// (Revoked in node_wire.h), each about slots into which the prefill node cannot write any more.
struct Revocation {
  std::uint64_t reservation = 0;
  std::uint32_t rank = 0;  // the rank that answers; 0 in an order
  std::vector<RevokedChunk> chunks;
  KVFERRY_FIELDS(reservation, rank, chunks);
};

/// The destinations of a push for one rank. A grant is empty if the decode node has granted no slot for that chunk.
struct PushOrder {
  std::uint64_t push = 0;
  std::string remote_address;
  std::vector<std::string> grants;  // a grant for each chunk of the offer, in the same order; or none, if all are empty
  KVFERRY_FIELDS(push, remote_address, grants);
};

/// The order to push a chunk that is complete in its slot.
struct PushStart {
  std::uint64_t push = 0;
  std::uint32_t index = 0;
  ChunkRef chunk;
  std::uint32_t num_tokens = 0;
  std::vector<std::uint64_t> checksums;  // [rank] checksum of the rank's bytes
  KVFERRY_FIELDS(push, index, chunk, num_tokens, checksums);
};

/// One rank's report that layers of chunks are in its frames; the fields are as in PushProgress.
struct LayersSaved {
  std::uint64_t push = 0;
  std::uint32_t rank = 0;
  std::vector<std::uint32_t> indices;
  std::uint32_t done = 0, of = 0;
  KVFERRY_FIELDS(push, rank, indices, done, of);
};

/// The outcome of one rank's push of one chunk; sent exactly once for each chunk that the rank was ordered to push.
struct PushOutcome {
  std::uint64_t push = 0;
  std::uint32_t rank = 0;
  std::uint32_t index = 0;
  bool ok = false;
  std::string what;
  std::uint8_t code = 0;             // ErrorCode of the transfer
  std::string path = {};             // the path that moved the bytes
  std::uint32_t limit_mb_per_s = 0;  // measured limit of this rank's path, see LifeEvent
  KVFERRY_FIELDS(push, rank, index, ok, what, code, path, limit_mb_per_s);
};

}  // namespace kvferry
