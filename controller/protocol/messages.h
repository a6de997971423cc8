// The messages between nodes and the controller, which PROTOCOL.md lists. Each is a msgpack array whose first element
// is the header. A struct grows only at its end: an old reader ignores new fields, a new reader keeps the defaults of
// missing ones. Any other change must raise kProtocol.newest. Header, Hello and Refused must never change except at
// their end, so that any two releases can agree on a version or refuse each other. Over 200 lines, because it's a list.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "controller/api/client.h"
#include "controller/api/status.h"
#include "controller/protocol/columns.h"
#include "controller/protocol/values.h"
#include "transport/base/net/members.h"
#include "transport/base/versions.h"
#include "transport/base/wire.h"

namespace kvferry::controller::wire {

constexpr VersionRange kProtocol{1, 1};  // versions that this release speaks
constexpr std::uint32_t kProtocolVersion = kProtocol.newest;

struct Header {
  std::uint32_t version = kProtocolVersion;
  std::uint32_t type = 0;
  KVFERRY_FIELDS(version, type);
};

// Messages from nodes and commands to the controller. kLeastRole: the lowest role that a member's key must have for the
// controller to accept the message. If a struct lacks kLeastRole, the controller does not compile.
struct Hello {
  static constexpr net::Role kLeastRole = net::Role::kWorker;
  Header header{kProtocolVersion, 1};
  NodeInfo node{};
  std::uint64_t next_sequence = 0;  // number of the next Publish or Evict
  // Protocol versions that the node speaks; 0: the node speaks only the version in the header. The header has the
  // node's oldest version, so that older controllers can read the message.
  std::uint32_t oldest_protocol = 0, newest_protocol = 0;
  KVFERRY_FIELDS(header, node.name_space, node.engine_id, node.incarnation, node.role, node.endpoint, node.fingerprint,
                 next_sequence, node.serves, node.version, oldest_protocol, newest_protocol, node.secret, node.details);
};
struct Heartbeat {
  static constexpr net::Role kLeastRole = net::Role::kWorker;
  Header header{kProtocolVersion, 4};
  std::uint64_t incarnation = 0;
  std::uint64_t next_sequence = 0;    // number of the next Publish or Evict; shows whether the last one was lost
  std::vector<TierDigest> digests{};  // digest of the node's chunks in each tier at next_sequence; empty: not compared
  std::uint64_t load = 0;             // number of requests on the node
  std::int64_t wall_ms = 0;           // the node's wall clock, in milliseconds since 1970; 0: not sent
  // An encoded NodeReport; empty: the node's last report stays valid. It is decoded separately, so that a malformed
  // report never makes the heartbeat malformed.
  std::string report{};
  KVFERRY_FIELDS(header, incarnation, next_sequence, digests, load, wall_ms, report);
};
struct Publish {
  static constexpr net::Role kLeastRole = net::Role::kWorker;
  Header header{kProtocolVersion, 6};
  std::uint64_t incarnation = 0;
  std::uint64_t sequence = 0;  // Publish and Evict are numbered in one series without gaps
  // If true, this message begins a snapshot. All that the node published earlier is void: at once or, if has_end is
  // set, when the snapshot ends.
  bool begins_snapshot = false;
  KeyBlob full{};
  TailColumns tails{};
  std::uint32_t tier = static_cast<std::uint32_t>(Tier::kHost);  // tier of all entries
  bool has_end = false;        // used with begins_snapshot: a message with ends_snapshot follows; older nodes send none
  bool ends_snapshot = false;  // true: this message ends the snapshot, which now lists all that the node holds
  KVFERRY_FIELDS(header, incarnation, sequence, begins_snapshot, full, tails, tier, has_end, ends_snapshot);
};
struct Evict {
  static constexpr net::Role kLeastRole = net::Role::kWorker;
  Header header{kProtocolVersion, 7};
  std::uint64_t incarnation = 0;
  std::uint64_t sequence = 0;
  KeyBlob keys{};
  KVFERRY_FIELDS(header, incarnation, sequence, keys);
};
struct Lookup {
  static constexpr net::Role kLeastRole = net::Role::kReader;
  Header header{kProtocolVersion, 8};
  std::uint64_t incarnation = 0;
  std::uint64_t token = 0;
  KeyBlob keys{}, tail_groups{}, exact_tails{};
  KVFERRY_FIELDS(header, incarnation, token, keys, tail_groups, exact_tails);
};
struct Leave {
  static constexpr net::Role kLeastRole = net::Role::kWorker;
  Header header{kProtocolVersion, 10};
  std::uint64_t incarnation = 0;
  KVFERRY_FIELDS(header, incarnation);
};
/// A command of an operator or a node; PROTOCOL.md lists the verbs and which fields each reads. No registration is
/// needed. Pins of a registered node that names no owner are read leases and end with that node.
struct AdminRequest {
  static constexpr net::Role kLeastRole = net::Role::kWorker;  // some verbs need a higher role, see least_role_for()
  Header header{kProtocolVersion, 15};
  std::uint64_t token = 0;
  std::string verb{}, name_space{}, engine_id{}, other_engine_id{}, owner{};
  KeyBlob keys{};
  std::uint64_t ttl_ms = 0;
  std::uint64_t number = 0;
  KVFERRY_FIELDS(header, token, verb, name_space, engine_id, other_engine_id, owner, keys, ttl_ms, number);
};
/// Returns the lowest role that an AdminRequest with this verb needs. A worker may also drain its own nodes.
constexpr net::Role least_role_for(std::string_view verb) {
  return verb == "pin" ? net::Role::kWorker : net::Role::kAdmin;
}
/// Requests a StatusReply; no registration is needed.
struct StatusRequest {
  static constexpr net::Role kLeastRole = net::Role::kReader;
  Header header{kProtocolVersion, 13};
  KVFERRY_FIELDS(header);
};

// Messages from the controller to nodes and commands.
/// Confirms a Hello. The header has the version that both sides use from now on.
struct Registered {
  Header header{kProtocolVersion, 2};
  std::uint64_t incarnation = 0;
  bool snapshot_wanted = false;
  std::vector<std::string> replicas{};  // endpoints of all live replicas, the sender included; empty: no replicas
  KVFERRY_FIELDS(header, incarnation, snapshot_wanted, replicas);
};
struct Refused {
  Header header{kProtocolVersion, 3};
  std::string reason{};
  // Newest incarnation known under the node's namespace and engine id; 0: none, or not sent.
  std::uint64_t newest_incarnation = 0;
  KVFERRY_FIELDS(header, reason, newest_incarnation);
};
struct HeartbeatAck {
  Header header{kProtocolVersion, 5};
  std::uint64_t incarnation = 0;
  std::uint64_t kept_below = 0;         // number for Client::kept_below()
  std::vector<std::string> replicas{};  // as in Registered; empty: unchanged since the last list, or no replicas
  KVFERRY_FIELDS(header, incarnation, kept_below, replicas);
};
struct LookupReply {
  Header header{kProtocolVersion, 9};
  std::uint64_t token = 0;
  std::vector<Holder> holders{};
  std::uint64_t index_version = 0;
  KVFERRY_FIELDS(header, token, holders, index_version);
};
struct SnapshotWanted {
  Header header{kProtocolVersion, 11};
  std::uint64_t incarnation = 0;
  // The node has used all lower numbers. A snapshot that begins at this number or later is enough.
  std::uint64_t next_sequence = 0;
  bool resend_will_do = false;  // no snapshot is needed if all messages from resend_from on are sent again
  std::uint64_t resend_from = ~std::uint64_t{0};  // first missing number; older controllers don't send it
  KVFERRY_FIELDS(header, incarnation, next_sequence, resend_will_do, resend_from);
};
/// Tells a node that it is not registered on this connection, e.g. because the controller restarted or the lease
/// expired. The node must send Hello.
struct Unregistered {
  Header header{kProtocolVersion, 12};
  std::uint64_t incarnation = 0;  // the incarnation in the message that is answered
  KVFERRY_FIELDS(header, incarnation);
};
struct AdminReply {
  Header header{kProtocolVersion, 16};
  std::uint64_t token = 0;
  bool is_done = false;
  std::string text{};  // outcome or reason of the refusal, as a sentence
  // Depends on the verb. pin and purge: id of the new pin or purge; quota: the new quota, or 0 if the quota was
  // removed; unpin and clear: number of nodes to which an order was addressed; move: number of chunks to move; drain
  // and undrain: 0.
  std::uint64_t number = 0;
  KVFERRY_FIELDS(header, token, is_done, text, number);
};
/// Orders the node to pin those of `keys` that it holds.
struct Pin {
  Header header{kProtocolVersion, 17};
  std::uint64_t incarnation = 0;
  std::uint64_t pin_id = 0;
  std::uint64_t ttl_ms = 0;
  KeyBlob keys{};
  KVFERRY_FIELDS(header, incarnation, pin_id, ttl_ms, keys);
};
struct Unpin {
  Header header{kProtocolVersion, 18};
  std::uint64_t incarnation = 0;
  std::uint64_t pin_id = 0;
  KVFERRY_FIELDS(header, incarnation, pin_id);
};
/// Orders the node to copy chunks into its own pool from the node that `engine_id` and `endpoint` name.
struct Replicate {
  Header header{kProtocolVersion, 19};
  std::uint64_t incarnation = 0;
  std::string engine_id{}, endpoint{};
  std::uint64_t ttl_ms = 0;
  KeyBlob full{};
  TailColumns tails{};
  std::string member{};  // NodeDetails::member of that node
  KVFERRY_FIELDS(header, incarnation, engine_id, endpoint, ttl_ms, full, tails, member);
};
struct EvictOrder {
  Header header{kProtocolVersion, 20};
  std::uint64_t incarnation = 0;
  bool all = false;
  KeyBlob keys{};  // ignored if `all` is true
  KVFERRY_FIELDS(header, incarnation, all, keys);
};
/// Orders the node to drop the chunks that came from `giver`, and to accept no more from it. purge_id 0: the node may
/// accept chunks from `giver` again.
struct PurgeOrder {
  Header header{kProtocolVersion, 21};
  std::uint64_t incarnation = 0;
  std::uint64_t purge_id = 0;
  std::string giver{};  // endpoint of a node, or "member:NAME"
  KVFERRY_FIELDS(header, incarnation, purge_id, giver);
};
struct StatusReply {
  Header header{kProtocolVersion, 14};
  Status status{};
  KVFERRY_FIELDS(header, status);
};

// Receivers visit these variants with one overload for each message, so that a missing overload is a compile error.
using FromNode = std::variant<Hello, Heartbeat, Publish, Evict, Lookup, Leave, AdminRequest, StatusRequest>;
using FromController = std::variant<Registered, Refused, HeartbeatAck, LookupReply, SnapshotWanted, Unregistered,
                                    AdminReply, Pin, Unpin, Replicate, EvictOrder, PurgeOrder, StatusReply>;

}  // namespace kvferry::controller::wire
