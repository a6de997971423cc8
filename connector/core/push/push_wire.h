// What two nodes, and a node's scheduler and its workers, say to each other about a push: the prefill side offers a
// prompt's chunks before they are computed, the decode side lends a slot for each that it wants, the prefill side's
// workers write into them while the model goes on, and a settlement says which are whole.
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
  ChunkKey tail_group;  // of a tail that belongs to one; else zeros
  KVFERRY_FIELDS(key, num_tokens, tail_group);
};

struct PushOffer {
  std::string fingerprint;
  std::uint32_t num_ranks = 0;
  std::vector<Shard> shards;  // [rank] of the offering side, whose runtime fills it in: who is shaped otherwise pulls
  std::vector<OfferedChunk> chunks;
  KVFERRY_FIELDS(fingerprint, num_ranks, shards, chunks);
};

/// The answer's word on one offered chunk.
enum class PushVerdict : std::uint8_t {
  kDeclined = 0,  // no room, or nothing that fits: pulled when it is needed
  kPresent = 1,   // here already, or on its way here
  kGranted = 2      // a slot is lent
};

struct PushReply {
  std::uint64_t ticket = 0;            // names the reservation at its owner; 0: nothing was lent
  std::string refused;                 // why, when the whole offer is refused
  std::vector<std::uint8_t> verdicts;  // [offered chunk] PushVerdict; another value counts as kDeclined
  KVFERRY_FIELDS(ticket, refused, verdicts);
};

struct SettledChunk {
  std::uint32_t index = 0;  // in PushOffer::chunks
  bool ok = false;          // false: not all of it came, and nothing more will
  std::uint32_t window_from = 0;
  std::vector<std::uint64_t> checksums;  // [rank]
  KVFERRY_FIELDS(index, ok, window_from, checksums);
};

struct PushSettlement {
  std::uint64_t ticket = 0;
  std::vector<SettledChunk> chunks;
  KVFERRY_FIELDS(ticket, chunks);
};

// ---- between a scheduler and its workers ----
/// A slot that is lent to another node, or is so no longer.
struct GrantedChunk {
  std::uint32_t index = 0;
  ChunkRef chunk;
  std::uint32_t num_tokens = 0;
  KVFERRY_FIELDS(index, chunk, num_tokens);
};

struct GrantOrder {
  std::uint64_t ticket = 0;
  std::vector<GrantedChunk> chunks;
  KVFERRY_FIELDS(ticket, chunks);
};

/// Names of the lent memory for the other node's transport; an empty one: it could not be lent.
struct GrantOutcome {
  std::uint64_t ticket = 0;
  std::uint32_t rank = 0;
  std::vector<std::string> grants;  // [chunk of the order]
  KVFERRY_FIELDS(ticket, rank, grants);
};

struct RevokedChunk {
  std::uint32_t index = 0;
  ChunkRef chunk;
  bool ok = false;
  std::vector<std::uint64_t> checksums;  // [rank]
  KVFERRY_FIELDS(index, chunk, ok, checksums);
};

/// Take these slots back, so that nobody writes them any more: the order, and with the same fields a rank's answer.
struct Revocation {
  std::uint64_t ticket = 0;
  std::uint32_t rank = 0;  // of an answer
  std::vector<RevokedChunk> chunks;
  KVFERRY_FIELDS(ticket, rank, chunks);
};

/// Where the chunks of a push go, for one rank. An empty grant: that chunk is not wanted.
struct PushOrder {
  std::uint64_t push = 0;
  std::string remote_address;
  std::vector<std::string> grants;  // [offered chunk]
  KVFERRY_FIELDS(push, remote_address, grants);
};

/// This chunk lies whole in its slot: push it.
struct PushStart {
  std::uint64_t push = 0;
  std::uint32_t index = 0;
  ChunkRef chunk;
  std::uint32_t num_tokens = 0;
  std::vector<std::uint64_t> checksums;  // [rank]
  KVFERRY_FIELDS(push, index, chunk, num_tokens, checksums);
};

/// What became of a chunk that a rank began to push; exactly once each.
struct PushOutcome {
  std::uint64_t push = 0;
  std::uint32_t rank = 0;
  std::uint32_t index = 0;
  bool ok = false;
  std::string what;
  KVFERRY_FIELDS(push, rank, index, ok, what);
};

}  // namespace kvferry
