// The controller's client: registers this node, tells what it holds, asks who holds what. Everything is a message; no
// call blocks, and the owner's poll loop drives it, so it runs on whichever one thread owns it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "controller/api/tier.h"
#include "transport/base/chunk_key.h"
#include "transport/base/clock.h"
#include "transport/base/ids.h"
#include "transport/base/result.h"
#include "transport/base/versions.h"

namespace kvferry::controller {

/// What a node says of itself when it registers.
struct NodeInfo {
  EngineId engine_id;
  Incarnation incarnation;
  std::string role;         // vLLM's kv_role
  std::string endpoint;     // where peers ask this node for leases, e.g. "tcp://10.0.0.7:41234"
  std::string name_space;   // nodes of one namespace must have equal fingerprints
  std::string fingerprint;  // readable: model, KV dtype, layers, heads, head size, chunk_tokens, format version
  std::string serves{};     // URL under which routers reach this node's server; empty: it tells none
  std::string version{};    // of its kvferry; empty: this one's, or an older that tells none
};

/// One chunk that a node holds. A tail names its group so that others can discover it (chunk_key.h).
struct ChunkEntry {
  ChunkKey key;
  std::uint32_t num_tokens = 0;
  bool is_tail = false;
  ChunkKey tail_group;  // meaningful only where is_tail and num_tokens >= kTailGroupTokens
};

/// Keys of full chunks in prefix order; tail_groups[i] is the group of a tail that would follow i full chunks
/// (so one more than keys, or fewer where the tokens end); exact_tails are keys of tails worth asking for by name.
struct LookupQuery {
  std::vector<ChunkKey> keys;
  std::vector<ChunkKey> tail_groups;
  std::vector<ChunkKey> exact_tails;
};

/// The same where the keys lie elsewhere.
struct LookupView {
  std::span<const ChunkKey> keys, tail_groups, exact_tails;

  LookupView() = default;
  LookupView(const LookupQuery& query)  // NOLINT(google-explicit-constructor)
      : keys(query.keys), tail_groups(query.tail_groups), exact_tails(query.exact_tails) {}
  std::size_t num_keys() const { return keys.size() + tail_groups.size() + exact_tails.size(); }
};

struct Holder {
  EngineId engine_id;
  Incarnation incarnation;
  std::string endpoint;
  std::uint32_t num_full_chunks = 0;  // this node holds keys[0 .. num_full_chunks)
  // Tails it holds that could follow those chunks, at most 16: first those asked for by name, then deepest group first,
  // then newest first.
  std::vector<ChunkEntry> tails;
  Tier tier = Tier::kHost;  // the slowest that one of the full chunks lies in
  bool confirmed = true;    // false: word of this holder was lost and not yet made good; it may have more, or less
};

struct LookupReply {
  std::uint64_t token = 0;      // of the lookup() it answers
  std::vector<Holder> holders;  // best first: most full chunks, then most recently heard of; never the asker; <= 64
  // Grows with each change of what this controller may answer, over restarts too; without state it starts anew.
  std::uint64_t index_version = 0;
};
struct Registered {};  // at first, and again after each loss
struct Refused {
  std::string reason;
};  // e.g. another fingerprint in this namespace; final
struct Lost {
  std::string reason;
};  // no word for `lost_after_ms`; the client keeps trying on its own
// The controller knows nothing of this incarnation, or misses more of it than can be sent again: publish() everything,
// in one call or many, then end_snapshot(). Until then the controller goes by what it heard before.
struct SnapshotWanted {};
/// Only where lookup_timeout_ms is set: it ended without an answer.
struct LookupFailed {
  std::uint64_t token = 0;
  std::string reason;
};
// The controller's wishes. A node may refuse any of them; what it does shows in what it publishes and evicts.
struct PinChunks {  // those of these that it has, for so long; the numbers are the controller's and of one life of it
  std::uint64_t hold = 0;
  std::vector<ChunkKey> keys;
  TimeNs ttl = 0;
};
struct UnpinChunks {
  std::uint64_t hold = 0;
};
struct ReplicateChunks {  // from that node; num_tokens of full chunks is 0
  EngineId engine_id;
  std::string endpoint;
  std::vector<ChunkEntry> chunks;
  TimeNs ttl = 0;
};
struct EvictChunks {
  bool all = false;
  std::vector<ChunkKey> keys;  // or these
};
using ClientEvent = std::variant<LookupReply, Registered, Refused, Lost, SnapshotWanted, PinChunks, UnpinChunks,
                                 ReplicateChunks, EvictChunks, LookupFailed>;

struct ClientOptions {
  // tcp://, ipc://, unix:// or stream://; several with commas: replicas, the preferred one first (replica_client.h).
  std::string controller = "tcp://127.0.0.1:14600";
  NodeInfo node;
  std::int64_t heartbeat_ms = 500;
  std::int64_t lost_after_ms = 2000;
  // Each look-up ends in LookupReply or LookupFailed within so long of the process() that follows it, and may be asked
  // again meanwhile. 0: the caller keeps its own deadline.
  std::int64_t lookup_timeout_ms = 0;
  VersionRange protocol{};  // that it speaks; none: what this release does
};

/// Threads: one owner. Poll fd() for reading, then call process(); call process() at least every heartbeat_ms as well.
/// Whoever calls it every 50 ms has a lost last message seen within 150 ms, by a heartbeat that follows news.
class Client {
 public:
  virtual ~Client() = default;
  virtual int fd() const = 0;  // readable until process() has taken in what waits; poll it, don't read it
  virtual std::vector<ClientEvent> process(TimeNs now) = 0;
  virtual bool registered() const = 0;
  virtual const std::string& controller() const = 0;  // the endpoint, for messages
  /// What publish(), evict() and end_snapshot() send is numbered: the next one's number, and the controller's word that
  /// all below kept_below() outlives the end of its process, or, where it keeps no state, was applied.
  virtual std::uint64_t next_sequence() const = 0;
  virtual std::uint64_t kept_below() const = 0;
  /// How many requests this node has: heartbeats tell it, the next one within 200 ms of a change.
  virtual void set_load(std::uint64_t num_requests) = 0;

  /// While not registered, or not connected, they are kept and sent later, up to 16 MiB; beyond that a SnapshotWanted
  /// follows registration.
  virtual void publish(const std::vector<ChunkEntry>& chunks) = 0;
  virtual void evict(const std::vector<ChunkKey>& keys) = 0;
  /// After a SnapshotWanted: everything that this node holds was published since.
  virtual void end_snapshot() = 0;
  /// kUnavailable while not registered or not connected, without lookup_timeout_ms; kInvalidArgument: more than 65536
  /// keys. The reply comes as an event, or never: the caller keeps its own deadline, or sets lookup_timeout_ms.
  virtual Result<std::uint64_t> lookup(const LookupQuery& query) = 0;
  /// Says goodbye, so that the controller forgets this node at once. Best effort: the destructor waits up to 150 ms for
  /// it to get out. Nothing is sent or reported afterwards.
  virtual void leave() = 0;
};

/// kInvalidArgument: an endpoint is not of one of the forms, or there twice.
Result<std::unique_ptr<Client>> make_client(ClientOptions options);

/// Takes the events on the way, and answers the first SnapshotWanted with nothing held: a node that already holds
/// chunks publishes them after it.
/// Blocks until registered, refused (kRefused) or the deadline passed (kUnavailable: "controller ... not reachable").
Result<void> wait_registered(Client& client, const Clock& clock, std::int64_t timeout_ms);

}  // namespace kvferry::controller
