// Messages between nodes, and between a node's scheduler and its workers. One envelope; the version is checked first.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "connector/core/peer_wire.h"
#include "connector/core/worker_core.h"

namespace kvferry {

constexpr std::uint32_t kNodeWireVersion = 2;

enum class NodeMessage : std::uint32_t {
  kLeaseRequest = 1,
  kLeaseAnswer = 2,
  kLeaseRelease = 3,
  kPullOrder = 4,
  kPullOutcome = 5
};

struct Envelope {
  std::uint32_t version = kNodeWireVersion;
  std::uint32_t type = 0;
  std::uint64_t id = 0;  // the asker's; an answer carries it back
  std::string body;
  KVFERRY_FIELDS(version, type, id, body);
};

/// Where one rank's pool can be reached.
struct RankEndpoint {
  std::string transport_address;
  std::string pool_region;
  std::uint64_t chunk_bytes = 0;  // a slot's size
  KVFERRY_FIELDS(transport_address, pool_region, chunk_bytes);
};

struct LeaseAnswer {
  LeaseReply reply;
  std::vector<RankEndpoint> ranks;  // [rank]
  KVFERRY_FIELDS(reply, ranks);
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
std::string seal(NodeMessage type, std::uint64_t id, const Body& body) {
  return encode(Envelope{kNodeWireVersion, static_cast<std::uint32_t>(type), id, encode(body)});
}

}  // namespace kvferry
