// Messages between nodes, and between a scheduler node and its workers. All but WorkerHello are sent in an Envelope.
// New fields are added only at the end of a struct; any other change of a struct must raise kNodeWire.newest.
// Every message in an Envelope is in AnyMessage and in the variant of its direction, which each visitor handles wholly.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "connector/core/flight_recorder.h"
#include "connector/core/peer_wire.h"
#include "connector/core/push_wire.h"
#include "connector/core/worker_core.h"
#include "transport/base/versions.h"

namespace kvferry {

constexpr VersionRange kNodeWire{2, 2};                       // the versions that this release speaks
constexpr std::uint32_t kNodeWireVersion = kNodeWire.newest;  // version used between a scheduler and its workers

struct Envelope {
  std::uint32_t version = kNodeWireVersion;
  std::uint32_t type = 0;
  std::uint64_t id = 0;  // number that a node gives its request to another node; the answer repeats it
  std::string body;
  std::uint32_t oldest = 0, newest = 0;  // versions that the sender speaks; 0, 0: only `version`, as an older sender
  std::string release{};                 // the sender's kvferry version
  KVFERRY_FIELDS(version, type, id, body, oldest, newest, release);
};

/// The sender of a request, with what the answer needs.
struct Asker {
  std::string sender;  // the asker's ZeroMQ routing id at this node's server socket
  std::uint64_t id = 0;
  std::uint32_t version = 0;          // node protocol version of the request and its answer
  std::string member{}, curve_key{};  // the ones of the asker, as in ServerSocket::Message
};

/// Where the pool of one rank can be reached.
struct RankEndpoint {
  std::string transport_address;
  std::string pool_region;
  std::uint64_t chunk_bytes = 0;  // size of a slot in the pool
  Shard shard = {};               // has no layers if the sender's version is too old to send a shard
  std::string frames_region{};    // exported region of the rank's GPU frames; empty: it has none that transfers reach
  std::uint64_t frame_bytes = 0;  // size of a frame
  ShardParts parts = {};          // has no layers if the rank's chunks are described by `shard` alone
  KVFERRY_FIELDS(transport_address, pool_region, chunk_bytes, shard, frames_region, frame_bytes, parts);
};

/// A message that is a bare number instead of an array of fields.
struct BareNumber {
  std::uint64_t value = 0;
  template <class Packer>
  void msgpack_pack(Packer& packer) const {
    packer.pack(value);
  }
  void msgpack_unpack(const msgpack::object& object) { object.convert(value); }
};

// ---- between nodes ----
struct LeaseRelease : BareNumber {};  // `value` is the number of the lease to release

struct LeaseAnswer {
  LeaseReply reply;
  std::vector<RankEndpoint> ranks;  // [rank]
  KVFERRY_FIELDS(reply, ranks);
};

/// The answer to a PushOffer, with the memory that the decode node grants.
struct PushAnswer {
  PushReply reply;
  std::vector<RankEndpoint> ranks;               // [rank]
  std::vector<std::vector<std::string>> grants;  // [rank][offered chunk] exported grant; empty: not granted
  KVFERRY_FIELDS(reply, ranks, grants);
};

/// Asks for what the node's flight recorder has of a request, of the newest requests, of the requests that took the
/// most time, or of the requests of a trace; exactly one field is set. `kvferry explain` sends this message.
struct LivesRequest {
  std::string request{};  // the whole id, or a part of it as FlightRecorder::find() says
  std::uint32_t num_newest = 0, num_slowest = 0;
  std::string trace{};  // a W3C trace id
  KVFERRY_FIELDS(request, num_newest, num_slowest, trace);
};

struct LivesAnswer {
  std::vector<RequestLife> lives;
  std::int64_t unix_ms = 0;  // the host's clock, so that the asker can say how far hosts' clocks differ; 0: unknown
  KVFERRY_FIELDS(lives, unix_ms);
};

// ---- between a scheduler and its workers ----
/// Asks a worker for checksums of parts of its chunks, because a node of other parallelism wants to read these parts.
struct ChecksumOrder {
  struct Item {
    ChunkRef chunk;
    std::uint32_t num_tokens = 0;
    std::uint64_t checksum = 0;  // checksum of the whole chunk; if the bytes don't match it, the chunk is damaged
    KVFERRY_FIELDS(chunk, num_tokens, checksum);
  };
  std::uint64_t order = 0;
  std::uint64_t num_cells = 0;  // as PullOrder::num_cells, for a chunk of this rank
  std::vector<ShardRun> runs;   // sorted by ShardRun::source; runs may overlap, but not much (RunChecksums)
  std::vector<Item> items;
  std::int64_t timeout_ms = 0;  // time after which the scheduler ignores the outcome
  std::uint32_t rank = 0;       // the worker's rank; the outcome repeats it
  KVFERRY_FIELDS(order, num_cells, runs, items, timeout_ms, rank);
};
/// The outcome of one item of a ChecksumOrder.
struct ChecksumOutcome {
  std::uint64_t order = 0;
  std::uint32_t rank = 0;
  std::uint32_t item = 0;
  bool ok = false;                       // false: the chunk is damaged, or no longer in its slot
  std::vector<std::uint64_t> checksums;  // [run]
  KVFERRY_FIELDS(order, rank, item, ok, checksums);
};

/// Asks a worker to pin the frames of leased chunks until FrameUnpin with the lease's number, at most for `timeout_ms`.
struct FramePinOrder {
  std::uint64_t lease = 0;
  std::uint32_t rank = 0;  // the worker's rank; the outcome repeats it
  std::int64_t timeout_ms = 0;
  std::vector<ChunkRef> chunks;
  std::vector<bool> are_growing = {};  // [chunk] LeasedChunk::is_growing; empty: none is
  KVFERRY_FIELDS(lease, rank, timeout_ms, chunks, are_growing);
};
struct FrameUnpin : BareNumber {};  // `value` is the number of the lease
struct FramePinOutcome {
  std::uint64_t lease = 0;
  std::uint32_t rank = 0;
  std::vector<std::uint32_t> frames;  // [chunk] the pinned frame, or kNoFrame
  KVFERRY_FIELDS(lease, rank, frames);
};
struct PushDrop : BareNumber {};  // `value` is the number of the push to drop
struct Revoked : Revocation {};   // a worker's answer to a Revocation

/// The message that a worker sends to its scheduler at start, as vLLM's handshake metadata.
struct WorkerHello {
  std::uint32_t rank = 0;
  std::string link_endpoint;  // endpoint at which the worker receives orders
  std::uint32_t num_slots = 0;
  RankEndpoint endpoint;
  KVFERRY_FIELDS(rank, link_endpoint, num_slots, endpoint);
};

// ---- all messages by direction ----
using PeerRequest = std::variant<LeaseRequest, LeaseRelease, PushOffer, PushSettlement, LivesRequest, PushProgress>;
using PeerAnswer = std::variant<LeaseAnswer, PushAnswer, LivesAnswer>;
using WorkerOrder = std::variant<PullOrder, ChecksumOrder, PushOrder, PushStart, PushDrop, GrantOrder, Revocation,
                                 FramePinOrder, FrameUnpin, PullProgress>;
using WorkerOutcome = std::variant<PullOutcome, ChecksumOutcome, PushOutcome, GrantOutcome, Revoked, FramePinOutcome,
                                   SlotsWritten, LayersSaved>;

/// All messages in the order of their numbers on the wire, which start at 1. A new message is added at the end.
using AnyMessage =
    std::variant<LeaseRequest, LeaseAnswer, LeaseRelease, PullOrder, PullOutcome, PushOffer, PushAnswer, PushSettlement,
                 GrantOrder, GrantOutcome, Revocation, Revoked, PushOrder, PushStart, PushDrop, PushOutcome,
                 ChecksumOrder, ChecksumOutcome, LivesRequest, LivesAnswer, FramePinOrder, FramePinOutcome, FrameUnpin,
                 SlotsWritten, PushProgress, PullProgress, LayersSaved>;

template <class Body, std::uint32_t kNumber = 1>
constexpr std::uint32_t message_type() {
  if constexpr (std::is_same_v<Body, std::variant_alternative_t<kNumber - 1, AnyMessage>>)
    return kNumber;
  else
    return message_type<Body, kNumber + 1>();
}
template <class Body>
inline constexpr std::uint32_t kMessageType = message_type<Body>();
template <class Body>
std::string seal(std::uint64_t id, const Body& body, std::uint32_t version = kNodeWireVersion) {
  return encode(Envelope{version, kMessageType<Body>, id, encode(body), kNodeWire.oldest, kNodeWire.newest,
                         std::string(kvferry::version())});
}

/// Returns the message in an envelope. Errors: kNotFound if the variant has no message of this type, for example
/// because the sender is newer; kCorrupt if the body is malformed.
template <class Message, std::size_t kIndex = 0>
Result<Message> unseal(const Envelope& envelope) {
  if constexpr (kIndex == std::variant_size_v<Message>) {
    return Error{ErrorCode::kNotFound, fmt::format("a message has type {}, unknown to this release", envelope.type)};
  } else {
    using Body = std::variant_alternative_t<kIndex, Message>;
    if (envelope.type != kMessageType<Body>) return unseal<Message, kIndex + 1>(envelope);
    return Message(KVFERRY_TRY(decode<Body>(envelope.body, fmt::format("node message of type {}", envelope.type))));
  }
}

/// A visitor for std::visit, made of one handler for each alternative.
template <class... Handlers>
struct Overloaded : Handlers... {
  using Handlers::operator()...;
};
template <class... Handlers>
Overloaded(Handlers...) -> Overloaded<Handlers...>;  // clang 14 needs this for aggregates

}  // namespace kvferry
