// Messages between nodes, and between a node's scheduler and its workers. One envelope; the version is checked first.
// Structs only grow at their ends; whatever breaks that raises kNodeWire.newest.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "connector/core/peer_wire.h"
#include "connector/core/push/push_wire.h"
#include "connector/core/worker_core.h"
#include "transport/base/versions.h"

namespace kvferry {

constexpr VersionRange kNodeWire{2, 2};                       // what this release speaks
constexpr std::uint32_t kNodeWireVersion = kNodeWire.newest;  // between processes of one node

enum class NodeMessage : std::uint32_t {
  kLeaseRequest = 1,
  kLeaseAnswer = 2,
  kLeaseRelease = 3,
  kPullOrder = 4,
  kPullOutcome = 5,
  // of pushes (push_wire.h); between nodes
  kPushOffer = 6,
  kPushAnswer = 7,
  kPushSettlement = 8,
  // between a scheduler and its workers
  kLendOrder = 9,
  kLendOutcome = 10,
  kReclaim = 11,
  kReclaimed = 12,
  kPushOrder = 13,
  kPushStart = 14,
  kPushDrop = 15,
  kPushOutcome = 16,
  // the same, of reads by nodes of another shape
  kChecksumOrder = 17,
  kChecksumOutcome = 18
};

struct Envelope {
  std::uint32_t version = kNodeWireVersion;
  std::uint32_t type = 0;
  std::uint64_t id = 0;  // the asker's; an answer carries it back
  std::string body;
  std::uint32_t oldest = 0, newest = 0;  // what the sender speaks; zeros, as older ones send: this version alone
  std::string release{};                 // its kvferry version
  KVFERRY_FIELDS(version, type, id, body, oldest, newest, release);
};

/// Where one rank's pool can be reached.
struct RankEndpoint {
  std::string transport_address;
  std::string pool_region;
  std::uint64_t chunk_bytes = 0;  // a slot's size
  Shard shard = {};               // no layers: an older version, which doesn't say
  KVFERRY_FIELDS(transport_address, pool_region, chunk_bytes, shard);
};

struct LeaseAnswer {
  LeaseReply reply;
  std::vector<RankEndpoint> ranks;  // [rank]
  KVFERRY_FIELDS(reply, ranks);
};

/// What a node lends for a push, and where it lies.
struct PushAnswer {
  PushReply reply;
  std::vector<RankEndpoint> ranks;               // [rank]
  std::vector<std::vector<std::string>> grants;  // [rank][offered chunk]; empty: not lent
  KVFERRY_FIELDS(reply, ranks, grants);
};

/// To a worker whose chunks somebody of another shape wants to read: the checksums of their parts.
struct ChecksumOrder {
  struct Item {
    ChunkRef chunk;
    std::uint32_t num_tokens = 0;
    std::uint64_t checksum = 0;  // of the whole; a chunk that doesn't match is damaged
    KVFERRY_FIELDS(chunk, num_tokens, checksum);
  };
  std::uint64_t order = 0;
  std::uint64_t num_cells = 0;  // of this rank
  std::vector<ShardRun> runs;   // by `source`; may overlap
  std::vector<Item> items;
  std::int64_t timeout_ms = 0;  // then nobody waits for it any longer
  std::uint32_t rank = 0;       // the worker's, which the outcome repeats
  KVFERRY_FIELDS(order, num_cells, runs, items, timeout_ms, rank);
};

/// One for each item, as they are done.
struct ChecksumOutcome {
  std::uint64_t order = 0;
  std::uint32_t rank = 0;
  std::uint32_t item = 0;
  bool ok = false;                       // false: damaged, or no longer there
  std::vector<std::uint64_t> checksums;  // [run]
  KVFERRY_FIELDS(order, rank, item, ok, checksums);
};

/// What a worker tells its scheduler at start, as vLLM's handshake metadata.
struct WorkerHello {
  std::uint32_t rank = 0;
  std::string link_endpoint;  // where it takes PullOrders
  std::uint32_t num_slots = 0;
  RankEndpoint endpoint;
  KVFERRY_FIELDS(rank, link_endpoint, num_slots, endpoint);
};

template <class Body>
std::string seal(NodeMessage type, std::uint64_t id, const Body& body, std::uint32_t version = kNodeWireVersion) {
  return encode(Envelope{version, static_cast<std::uint32_t>(type), id, encode(body), kNodeWire.oldest,
                         kNodeWire.newest, std::string(kvferry_release())});
}

}  // namespace kvferry
