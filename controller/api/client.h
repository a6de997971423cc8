// The controller's client: registers a node, reports its chunks, and looks up the holders of others. All calls are
// asynchronous messages; the owner's poll loop drives the client on one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "controller/api/node_info.h"
#include "controller/api/tier.h"
#include "transport/base/chunk_key.h"
#include "transport/base/clock.h"
#include "transport/base/ids.h"
#include "transport/base/net/cluster_key.h"
#include "transport/base/result.h"
#include "transport/base/versions.h"

namespace kvferry::controller {

/// One chunk that a node holds. A tail names its group so that others can discover it (chunk_key.h).
struct ChunkEntry {
  ChunkKey key;
  std::uint32_t num_tokens = 0;
  bool is_tail = false;
  ChunkKey tail_group;  // meaningful only where is_tail and num_tokens >= kTailGroupTokens
};

struct LookupQuery {
  std::vector<ChunkKey> keys;         // full chunks in prefix order
  std::vector<ChunkKey> tail_groups;  // tail_groups[i]: group of a tail that would follow i full chunks; may end early
  std::vector<ChunkKey> exact_tails;  // tails to find by key
};

/// A LookupQuery whose keys are stored elsewhere.
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
  // At most 16 tails that could follow those chunks: exact_tails first, then the deepest group first, then the newest.
  std::vector<ChunkEntry> tails;
  Tier tier = Tier::kHost;  // slowest tier among the full chunks
  bool confirmed = true;  // false: the node may hold other chunks than stated, as a loss or restart is not repaired yet
};

struct LookupReply {
  std::uint64_t token = 0;      // returned by the lookup() that this answers
  std::vector<Holder> holders;  // without the caller, at most 64; draining nodes last, most chunks first, then newest
  // Increases with each change of the index, also across restarts; without a state folder it starts again at 0.
  std::uint64_t index_version = 0;
};
struct Registered {};  // after the first registration, and after each recovery from Lost
/// The controller refused the node, e.g. because its namespace has another fingerprint. The client does not try again.
struct Refused {
  std::string reason;
  Incarnation newest_incarnation{};  // the newest one that the controller knows of this engine id; 0: none
};
/// The controller was silent for `lost_after_ms`, or the connection broke. The client keeps trying to register.
struct Lost {
  std::string reason;
};
/// The controller lacks messages that the client no longer stores: publish() everything, in one call or many,
/// then call end_snapshot(). Until then the controller answers lookups from what it had.
struct SnapshotWanted {};
/// A lookup had no answer within lookup_timeout_ms. Never reported if lookup_timeout_ms is 0.
struct LookupFailed {
  std::uint64_t token = 0;
  std::string reason;
};
// Requests of the controller. A node may ignore any of them; the controller sees the outcome in what the node
// publishes and evicts.
/// Pin those of `keys` that this node holds. Ids are unique until the controller restarts.
struct PinChunks {
  std::uint64_t pin_id = 0;
  std::vector<ChunkKey> keys;
  TimeNs ttl = 0;
};
struct UnpinChunks {
  std::uint64_t pin_id = 0;
};
/// Replicate `chunks` from the named node.
struct ReplicateChunks {
  EngineId engine_id;
  std::string endpoint;
  std::vector<ChunkEntry> chunks;  // num_tokens of full chunks is 0
  TimeNs ttl = 0;
};
struct EvictChunks {
  bool all = false;
  std::vector<ChunkKey> keys;  // ignored where `all` is set
};
using ClientEvent = std::variant<LookupReply, Registered, Refused, Lost, SnapshotWanted, PinChunks, UnpinChunks,
                                 ReplicateChunks, EvictChunks, LookupFailed>;

struct ClientOptions {
  // tcp://, ipc://, unix:// or stream://; several separated by commas are replicas, the preferred one first.
  std::string controller = "tcp://127.0.0.1:14600";
  NodeInfo node;
  std::int64_t heartbeat_ms = 500;
  std::int64_t lost_after_ms = 2000;
  // Bound on the time from the process() after lookup() to LookupReply or LookupFailed; a lookup may be sent again
  // meanwhile. 0: the caller enforces its own deadline.
  std::int64_t lookup_timeout_ms = 0;
  VersionRange protocol{};  // protocol versions that this client speaks; empty: those of this release
  std::optional<net::ClusterKey> cluster_key{};  // the key of the controller; tcp:// connections are encrypted with it
};

/// Threads: one owner. It polls fd() for reading and calls process(), at least every heartbeat_ms. With a call every
/// 50 ms the controller notices the loss of a message within 150 ms, by the heartbeat that follows the message.
class Client {
 public:
  virtual ~Client() = default;
  virtual int fd() const = 0;  // readable while process() has work to do; for polling only
  virtual std::vector<ClientEvent> process(TimeNs now) = 0;
  virtual bool registered() const = 0;
  virtual const std::string& controller() const = 0;  // the controller's endpoint, for error messages
  virtual bool has_cluster_key() const = 0;
  /// Sequence number of the next message of publish(), evict() or end_snapshot().
  virtual std::uint64_t next_sequence() const = 0;
  /// Sequence numbers below this one are on the controller's disk or, where it keeps no state, applied.
  virtual std::uint64_t kept_below() const = 0;
  /// Number of requests on this node. Reported by heartbeats, at the latest 200 ms after a change.
  virtual void set_load(std::uint64_t num_requests) = 0;

  /// While the client is not registered, up to 16 MiB of changes are stored and sent after registration; if there are
  /// more, SnapshotWanted follows the registration.
  virtual void publish(const std::vector<ChunkEntry>& chunks) = 0;
  virtual void evict(const std::vector<ChunkKey>& keys) = 0;
  /// Completes the answer to SnapshotWanted: since then the caller has published everything that this node holds.
  virtual void end_snapshot() = 0;
  /// kUnavailable: not registered, and lookup_timeout_ms is 0; kInvalidArgument: more than 65536 keys. The reply is an
  /// event; without lookup_timeout_ms it may never come.
  virtual Result<std::uint64_t> lookup(const LookupQuery& query) = 0;
  /// Unregisters, so that the controller removes this node at once. Best effort: the destructor waits up to 150 ms for
  /// the message to be sent. The client does nothing afterwards.
  virtual void leave() = 0;
};

/// kInvalidArgument: an endpoint is malformed or repeated, or is stream:// and there is a cluster key.
Result<std::unique_ptr<Client>> make_client(const ClientOptions& options);

/// Blocks until the client is registered. Drops all events, and answers the first SnapshotWanted with an empty
/// snapshot: a node that already holds chunks publishes them afterwards.
/// kRefused: the controller refused the node; kUnavailable: not registered after `timeout_ms`.
Result<void> wait_registered(Client& client, const Clock& clock, std::int64_t timeout_ms);

/// Same as make_client() and wait_registered(), for a process that starts. Its incarnation is a time; if the clock was
/// set back since the last start, the controller knows a newer one. Then this one becomes the next after that.
Result<std::unique_ptr<Client>> make_registered_client(ClientOptions& options, const Clock& clock,
                                                       std::int64_t timeout_ms);

}  // namespace kvferry::controller
