// The messages between a node and the controller. Each is one ZeroMQ frame: a msgpack array whose first element is the
// header. A struct grows only at its end: an old reader ignores what is new, a new reader keeps the default of what is
// missing. Whatever breaks that rule raises kProtocol.newest. Header, Hello and Refused only grow for ever, so that
// versions can be agreed on and refused by any two. README.md has the table.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "controller/api/client.h"
#include "controller/api/status.h"
#include "controller/protocol/tier_digest.h"
#include "transport/base/result.h"
#include "transport/base/versions.h"
#include "transport/base/wire.h"

namespace kvferry::controller::wire {

constexpr VersionRange kProtocol{1, 1};  // what this release speaks
constexpr std::uint32_t kProtocolVersion = kProtocol.newest;
constexpr std::size_t kMessageBytesMax = std::size_t{4} << 20;  // ZeroMQ drops the connection that sends more
constexpr std::size_t kChunksPerPublishMax = 16'384;            // larger ones are split; stays far below the byte limit
constexpr std::size_t kKeysPerLookupMax = 65'536;               // keys, groups and exact tails together

struct Header {
  std::uint32_t version = kProtocolVersion;
  std::uint32_t type = 0;
  KVFERRY_FIELDS(version, type);
};

/// On the wire one binary of 16 bytes per key: an array of a thousand small binaries costs ten times as much to parse.
struct KeyBlob {
  std::vector<ChunkKey> keys;
};

/// Three columns of equal length. A group of sixteen zeros: none.
struct TailColumns {
  KeyBlob keys{};
  KeyBlob groups{};
  std::vector<std::uint32_t> num_tokens{};
  KVFERRY_FIELDS(keys, groups, num_tokens);
};

// Node to controller.
struct Hello {
  Header header{kProtocolVersion, 1};
  std::string name_space{}, engine_id{};
  std::uint64_t incarnation = 0;
  std::string role{}, endpoint{}, fingerprint{};
  std::uint64_t next_sequence = 0;  // of the next Publish or Evict
  std::string serves{}, version{};  // as in NodeInfo
  // What the node speaks; the header says the oldest of it, so that older controllers can read this. 0: the header's.
  std::uint32_t oldest_protocol = 0, newest_protocol = 0;
  KVFERRY_FIELDS(header, name_space, engine_id, incarnation, role, endpoint, fingerprint, next_sequence, serves,
                 version, oldest_protocol, newest_protocol);
};
struct Heartbeat {
  Header header{kProtocolVersion, 4};
  std::uint64_t incarnation = 0;
  std::uint64_t next_sequence = 0;    // shows the controller that the last Publish or Evict was lost
  std::vector<TierDigest> digests{};  // of what is held at next_sequence, by tier; none: not to be judged by it
  std::uint64_t load = 0;             // requests that the node has
  KVFERRY_FIELDS(header, incarnation, next_sequence, digests, load);
};
struct Publish {
  Header header{kProtocolVersion, 6};
  std::uint64_t incarnation = 0;
  std::uint64_t sequence = 0;    // one series for Publish and Evict, without gaps
  bool begins_snapshot = false;  // all that this node held before is void, at once or, with has_end, at the end
  KeyBlob full{};
  TailColumns tails{};
  std::uint32_t tier = static_cast<std::uint32_t>(Tier::kHost);  // of all of them
  bool has_end = false;        // of a begin: a message with ends_snapshot follows; older nodes send none
  bool ends_snapshot = false;  // everything that the node holds was told since the begin
  KVFERRY_FIELDS(header, incarnation, sequence, begins_snapshot, full, tails, tier, has_end, ends_snapshot);
};
struct Evict {
  Header header{kProtocolVersion, 7};
  std::uint64_t incarnation = 0;
  std::uint64_t sequence = 0;
  KeyBlob keys{};
  KVFERRY_FIELDS(header, incarnation, sequence, keys);
};
struct Lookup {
  Header header{kProtocolVersion, 8};
  std::uint64_t incarnation = 0;
  std::uint64_t token = 0;
  KeyBlob keys{}, tail_groups{}, exact_tails{};
  KVFERRY_FIELDS(header, incarnation, token, keys, tail_groups, exact_tails);
};
struct Leave {
  Header header{kProtocolVersion, 10};
  std::uint64_t incarnation = 0;
  KVFERRY_FIELDS(header, incarnation);
};
/// What an operator or a node wants done; README.md lists the verbs and which fields each reads. Anybody may ask; a
/// registered node that names no owner pins as a reader, and its pins end with it.
struct AdminRequest {
  Header header{kProtocolVersion, 15};
  std::uint64_t token = 0;
  std::string verb{}, name_space{}, engine_id{}, other_engine_id{}, owner{};
  KeyBlob keys{};
  std::uint64_t ttl_ms = 0;
  std::uint64_t number = 0;
  KVFERRY_FIELDS(header, token, verb, name_space, engine_id, other_engine_id, owner, keys, ttl_ms, number);
};
/// Anybody may ask; no registration needed.
struct StatusRequest {
  Header header{kProtocolVersion, 13};
  KVFERRY_FIELDS(header);
};

// Controller to node.
/// Its header's version is the one that both use from here on.
struct Registered {
  Header header{kProtocolVersion, 2};
  std::uint64_t incarnation = 0;
  bool snapshot_wanted = false;
  std::vector<std::string> replicas{};  // endpoints of all living ones, the sender's too; none: it is alone
  KVFERRY_FIELDS(header, incarnation, snapshot_wanted, replicas);
};
struct Refused {
  Header header{kProtocolVersion, 3};
  std::string reason{};
  KVFERRY_FIELDS(header, reason);
};
struct HeartbeatAck {
  Header header{kProtocolVersion, 5};
  std::uint64_t incarnation = 0;
  std::uint64_t kept_below = 0;  // messages below this number outlive the controller's process, where anything does
  std::vector<std::string> replicas{};  // as in Registered, where they changed since; else none
  KVFERRY_FIELDS(header, incarnation, kept_below, replicas);
};
struct HolderFields {
  std::string engine_id;
  std::uint64_t incarnation = 0;
  std::string endpoint;
  std::uint32_t num_full_chunks = 0;
  TailColumns tails{};
  std::uint32_t tier = static_cast<std::uint32_t>(Tier::kHost);
  bool confirmed = true;
  KVFERRY_FIELDS(engine_id, incarnation, endpoint, num_full_chunks, tails, tier, confirmed);
};
struct LookupReply {
  Header header{kProtocolVersion, 9};
  std::uint64_t token = 0;
  std::vector<HolderFields> holders{};
  std::uint64_t index_version = 0;
  KVFERRY_FIELDS(header, token, holders, index_version);
};
struct SnapshotWanted {
  Header header{kProtocolVersion, 11};
  std::uint64_t incarnation = 0;
  std::uint64_t next_sequence = 0;  // the controller heard of all below: a snapshot begun at or above is on its way
  bool resend_will_do = false;      // in place of a snapshot, from this number on:
  std::uint64_t resend_from = ~std::uint64_t{0};  // the first that is missing; older controllers don't tell
  KVFERRY_FIELDS(header, incarnation, next_sequence, resend_will_do, resend_from);
};
/// The controller knows no node on this connection (it restarted, or the lease ran out): say Hello.
struct Unregistered {
  Header header{kProtocolVersion, 12};
  std::uint64_t incarnation = 0;  // of the message that it answers
  KVFERRY_FIELDS(header, incarnation);
};
struct AdminReply {
  Header header{kProtocolVersion, 16};
  std::uint64_t token = 0;
  bool is_done = false;
  std::string text{};        // what was done, or why not: a sentence
  std::uint64_t number = 0;  // of the hold, or of the nodes or keys concerned
  KVFERRY_FIELDS(header, token, is_done, text, number);
};
/// Pin those of these keys that you have, for so long.
struct Pin {
  Header header{kProtocolVersion, 17};
  std::uint64_t incarnation = 0;
  std::uint64_t hold = 0;
  std::uint64_t ttl_ms = 0;
  KeyBlob keys{};
  KVFERRY_FIELDS(header, incarnation, hold, ttl_ms, keys);
};
struct Unpin {
  Header header{kProtocolVersion, 18};
  std::uint64_t incarnation = 0;
  std::uint64_t hold = 0;
  KVFERRY_FIELDS(header, incarnation, hold);
};
/// Replicate these chunks from that node into your pool.
struct Replicate {
  Header header{kProtocolVersion, 19};
  std::uint64_t incarnation = 0;
  std::string engine_id{}, endpoint{};
  std::uint64_t ttl_ms = 0;
  KeyBlob full{};
  TailColumns tails{};
  KVFERRY_FIELDS(header, incarnation, engine_id, endpoint, ttl_ms, full, tails);
};
struct EvictOrder {
  Header header{kProtocolVersion, 20};
  std::uint64_t incarnation = 0;
  bool all = false;
  KeyBlob keys{};  // or these
  KVFERRY_FIELDS(header, incarnation, all, keys);
};
struct StatusReply {
  Header header{kProtocolVersion, 14};
  Status status{};
  KVFERRY_FIELDS(header, status);
};

using Message = std::variant<Hello, Registered, Refused, Heartbeat, HeartbeatAck, Publish, Evict, Lookup, LookupReply,
                             Leave, SnapshotWanted, Unregistered, StatusRequest, StatusReply, AdminRequest, AdminReply,
                             Pin, Unpin, Replicate, EvictOrder>;

/// Never throws. Memory is bounded by a small multiple of bytes.size(), whatever lengths the bytes claim.
/// Errors: kCorrupt: not a message; kRefused: a protocol version that is not in `versions`, told in one sentence with
/// both. Hello and Refused are read whatever their version.
Result<Message> parse(std::string_view bytes, VersionRange versions = kProtocol);
/// Of what encode() made of a message.
std::uint32_t version_of(std::string_view bytes);
/// The same message in another version; 1 to 127.
void set_version(std::string& bytes, std::uint32_t version);

/// nullopt: not a tier of this version.
std::optional<Tier> tier_of(std::uint32_t number);
/// Full chunks and tails go into columns of their own; a full chunk's num_tokens does not travel.
void split_entries(std::span<const ChunkEntry> chunks, KeyBlob& full, TailColumns& tails);
TailColumns to_columns(std::span<const ChunkEntry> tails);
/// kCorrupt: the columns' lengths differ.
Result<std::vector<ChunkEntry>> from_columns(const TailColumns& tails);

}  // namespace kvferry::controller::wire

namespace msgpack {
MSGPACK_API_VERSION_NAMESPACE(MSGPACK_DEFAULT_API_NS) {
  namespace adaptor {

  template <>
  struct convert<kvferry::controller::wire::KeyBlob> {
    const msgpack::object& operator()(const msgpack::object& o, kvferry::controller::wire::KeyBlob& blob) const {
      constexpr std::size_t kKeyBytes = sizeof(kvferry::ChunkKey);
      if (o.type != msgpack::type::BIN || o.via.bin.size % kKeyBytes != 0) throw msgpack::type_error();
      blob.keys.resize(o.via.bin.size / kKeyBytes);
      if (!blob.keys.empty()) std::memcpy(blob.keys.data(), o.via.bin.ptr, o.via.bin.size);
      return o;
    }
  };
  template <>
  struct pack<kvferry::controller::wire::KeyBlob> {
    template <class Stream>
    packer<Stream>& operator()(msgpack::packer<Stream>& o, const kvferry::controller::wire::KeyBlob& blob) const {
      static_assert(sizeof(kvferry::ChunkKey) == 16, "keys lie side by side");
      const auto size_bytes = static_cast<std::uint32_t>(blob.keys.size() * sizeof(kvferry::ChunkKey));
      o.pack_bin(size_bytes);
      o.pack_bin_body(reinterpret_cast<const char*>(blob.keys.data()), size_bytes);
      return o;
    }
  };

  }  // namespace adaptor
}
}  // namespace msgpack
