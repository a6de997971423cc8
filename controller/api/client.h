// The controller's client: registers a node, reports the node's chunks, and looks up which nodes hold given chunks. No
// call of a Client waits for a reply: the owner calls process() in its poll loop, and process() returns the replies.
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
#include "transport/base/wall_clock.h"

namespace kvferry::controller {

/// One chunk that a node holds. `tail_group` names the group under which other nodes can find a tail (see
/// transport/base/chunk_key.h).
struct ChunkEntry {
  ChunkKey key;
  std::uint32_t num_tokens = 0;
  bool is_tail = false;
  ChunkKey tail_group;  // meaningful only for a tail with num_tokens >= kTailGroupTokens
};

struct LookupQuery {
  std::vector<ChunkKey> keys;  // keys of the full chunks, in the order of the prefix
  // tail_groups[i]: group of the tails that follow the first i of `keys`; groups at the end may be missing
  std::vector<ChunkKey> tail_groups;
  std::vector<ChunkKey> exact_tails;  // keys of tails to find, whatever groups the tails belong to
};

/// A LookupQuery that refers to keys stored elsewhere.
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
  std::uint32_t num_full_chunks = 0;  // this node holds the query's keys[0 .. num_full_chunks)
  // At most 16 tails that this node holds: first those in the query's exact_tails, then those of the query's groups
  // tail_groups[i] with i >= num_full_chunks, from the last group to the first, the newest tail of a group first.
  std::vector<ChunkEntry> tails;
  // Slowest tier among the full chunks, each counted in its fastest tier; kGpu if there are no full chunks.
  Tier tier = Tier::kHost;
  bool confirmed = true;  // false: this entry may be out of date, e.g. after lost messages or a controller restart
  std::string member{};   // NodeDetails::member of the node
};

struct LookupReply {
  std::uint64_t token = 0;  // token of the answered lookup, as lookup() returned it
  // At most 64 holders, without the node that asks. Draining nodes come after all others. Within each of these two
  // groups, nodes with more full chunks come first; among nodes with equally many, the node from which the controller
  // received a message last comes first.
  std::vector<Holder> holders;
  // Increases with each change of the index, and a restart of the controller does not lower it if the controller has a
  // state folder. Without a state folder it is 0 after a restart.
  std::uint64_t index_version = 0;
};
struct Registered {};  // the node is registered, for the first time or again after Lost
/// The controller refused the node, e.g. because its namespace has another fingerprint. The client does not try again.
struct Refused {
  std::string reason;
  Incarnation newest_incarnation{};  // newest one known under the node's namespace and engine id; 0: none, or not sent
};
/// The controller was silent for `lost_after_ms` or ended the registration, or the connection broke. The client keeps
/// trying to register.
struct Lost {
  std::string reason;
};
/// The controller needs a list of all chunks of this node: before the next process(), publish() everything, in one call
/// or many, then call end_snapshot(). Until then lookups find the chunks that the controller knew of before.
struct SnapshotWanted {};
/// A lookup had no answer within lookup_timeout_ms. Never reported if lookup_timeout_ms is 0.
struct LookupFailed {
  std::uint64_t token = 0;
  std::string reason;
};
// The structs from PinChunks to PurgeChunks are requests of the controller to this node. The node sends no answers, and
// may ignore any of the requests.
/// A request to pin those of `keys` that this node holds. Several requests may belong to one pin. After a restart of
/// the controller, the same id may name another pin.
struct PinChunks {
  std::uint64_t pin_id = 0;
  std::vector<ChunkKey> keys;
  TimeNs ttl = 0;
};
struct UnpinChunks {
  std::uint64_t pin_id = 0;
};
/// A request to replicate `chunks` from the named node.
struct ReplicateChunks {
  EngineId engine_id;
  std::string endpoint;
  std::vector<ChunkEntry> chunks;  // num_tokens is 0 for full chunks
  TimeNs ttl = 0;
  std::string member{};  // NodeDetails::member of that node
};
struct EvictChunks {
  bool all = false;
  std::vector<ChunkKey> keys;  // ignored if `all` is true
};
/// A request to drop the chunks that came from `giver` and to accept no more of it; purge_id 0: to accept it again.
struct PurgeChunks {
  std::uint64_t purge_id = 0;
  std::string giver;  // endpoint of a node, or "member:NAME"
};
using ClientEvent = std::variant<LookupReply, Registered, Refused, Lost, SnapshotWanted, PinChunks, UnpinChunks,
                                 ReplicateChunks, EvictChunks, PurgeChunks, LookupFailed>;

struct ClientOptions {
  // Endpoint of the controller (tcp://, ipc://, unix:// or stream://), or the endpoints of its replicas, separated by
  // commas, the preferred one first.
  std::string controller = "tcp://127.0.0.1:14600";
  NodeInfo node;
  std::int64_t heartbeat_ms = 500;
  std::int64_t lost_after_ms = 2000;
  // A lookup ends in LookupReply or, this long after the first process() that follows lookup(), in LookupFailed. Until
  // then the client may send the lookup several times. 0: lookups have no time limit; the caller enforces a limit of
  // its own.
  std::int64_t lookup_timeout_ms = 0;
  VersionRange protocol{};  // protocol versions that this client speaks; empty: those of this release
  std::optional<net::ClusterKey> cluster_key{};  // the controller's key; tcp:// connections are encrypted with it
  WallClock wall_ms = nullptr;                   // wall clock whose time heartbeats contain; nullptr: they contain none
};

/// A node's client of the controller. Threads: one owner, which polls fd() for reading and calls process(), at least
/// every heartbeat_ms. If the owner of a registered client calls process() every 50 ms, a heartbeat follows each
/// publish() and evict() within 150 ms, and shows the controller whether a message was lost.
class Client {
 public:
  virtual ~Client() = default;
  virtual int fd() const = 0;  // becomes readable when a message arrives or a connection is made; for polling only
  virtual std::vector<ClientEvent> process(TimeNs now) = 0;
  virtual bool registered() const = 0;
  virtual const std::string& controller() const = 0;  // ClientOptions::controller, for error messages
  virtual bool has_cluster_key() const = 0;
  /// Returns the number of the node's next Publish or Evict message. Each replica has numbers of its own; this function
  /// and kept_below() refer to the replica that lookups are sent to.
  virtual std::uint64_t next_sequence() const = 0;
  /// Returns a sequence number. All messages of this node with lower numbers outlive the controller's process or, if
  /// the controller has no state folder, have been applied.
  virtual std::uint64_t kept_below() const = 0;
  /// Sets the number of requests on this node. Heartbeats report it; the next one is due at the latest 200 ms after a
  /// change.
  virtual void set_load(std::uint64_t num_requests) = 0;
  /// Sets the encoded NodeReport (node_report.h) that the next heartbeat carries. The heartbeat is not sent earlier
  /// because of the report.
  virtual void set_report(std::string report) = 0;

  /// The client keeps the newest messages with published and evicted entries, up to 16 MiB, even while it is not
  /// registered. The controller requests those that it lacks. SnapshotWanted follows if the client no longer has them
  /// all, or if the controller does not know the node.
  virtual void publish(const std::vector<ChunkEntry>& chunks) = 0;
  virtual void evict(const std::vector<ChunkKey>& keys) = 0;
  /// Completes the answer to SnapshotWanted. The caller must have published everything that this node holds.
  virtual void end_snapshot() = 0;
  /// Returns the token of the LookupReply (or, after lookup_timeout_ms, the LookupFailed) that process() returns later.
  /// If lookup_timeout_ms is 0, a lost lookup has no event at all. kUnavailable, only without a timeout: the node is
  /// not registered, or the lookup can't be sent; kInvalidArgument: `query` has more than 65536 keys; kFull: 16384
  /// lookups with a timeout are unanswered.
  virtual Result<std::uint64_t> lookup(const LookupQuery& query) = 0;
  /// Unregisters, so that the controller removes this node at once. Best effort: the destructor waits up to 150 ms, for
  /// each replica, for the message to be sent. The client does nothing afterwards.
  virtual void leave() = 0;
};

/// Makes a client, which is not registered yet. kInvalidArgument: an endpoint is malformed or repeated, or an endpoint
/// is stream:// although there is a cluster key; kUnavailable: no file descriptor is left, this libzmq can't use a
/// cluster key, or Linux returned no random bytes.
Result<std::unique_ptr<Client>> make_client(const ClientOptions& options);

/// Blocks until the client is registered. Drops all events, and answers SnapshotWanted with an empty snapshot, so a
/// node that already holds chunks must publish them afterwards. kRefused: the controller refused the node;
/// kUnavailable: the client is not registered after `timeout_ms`.
Result<void> wait_registered(Client& client, const Clock& clock, std::int64_t timeout_ms);

/// Makes a client and waits until it is registered. An incarnation is the time at which a node's process started. If
/// the controller refuses the node and knows an incarnation that is not older, e.g. because the clock was set back,
/// options.node.incarnation becomes that incarnation plus 1, and the node registers again, at most twice. Errors: those
/// of make_client() and wait_registered().
Result<std::unique_ptr<Client>> make_registered_client(ClientOptions& options, const Clock& clock,
                                                       std::int64_t timeout_ms);

}  // namespace kvferry::controller
