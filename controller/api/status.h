// What a controller reports about itself, e.g. to `kvferry status` and /metrics.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "controller/api/node_info.h"
#include "controller/api/node_report.h"
#include "transport/base/net/cluster_key.h"
#include "transport/base/result.h"
#include "transport/base/wire.h"

namespace kvferry::controller {

/// Totals since the controller started. They never decrease.
struct Counters {
  std::uint64_t lookups = 0;
  std::uint64_t lookup_keys = 0;       // number of keys of full chunks in lookups
  std::uint64_t lookup_hits = 0;       // number of lookups for which a holder was found
  std::uint64_t chunks_published = 0;  // entries of Publish messages, including those that the index already had
  std::uint64_t chunks_evicted = 0;    // entries of Evict messages, including those that the index did not have
  std::uint64_t chunks_dropped = 0;  // how often a published entry was not stored because of a limit or quota on chunks
  std::uint64_t heartbeats = 0;
  std::uint64_t nodes_registered = 0;
  std::uint64_t nodes_refused = 0;
  std::uint64_t nodes_expired = 0;
  std::uint64_t nodes_fenced = 0;  // nodes replaced by a newer incarnation
  std::uint64_t snapshots_wanted = 0;
  std::uint64_t messages_malformed = 0;
  // Heartbeat, Publish, Evict, Lookup and Leave messages whose incarnation is not registered on their connection.
  std::uint64_t messages_unregistered = 0;
  std::uint64_t replies_dropped = 0;  // replies and orders whose connection was gone or whose peer did not read
  std::uint64_t resends_wanted = 0;
  std::uint64_t digests_differed = 0;    // heartbeats whose digests differed from the index
  std::uint64_t orders_sent = 0;         // Pin, Unpin, Replicate, EvictOrder and PurgeOrder messages
  std::uint64_t messages_taken = 0;      // messages that listeners passed to Sessions::receive()
  std::uint64_t messages_sent = 0;       // replies and orders, without the dropped ones
  std::uint64_t handshakes_refused = 0;  // connections whose peer did not prove that it has an accepted key
  std::uint64_t reports_malformed = 0;   // reports in heartbeats that were dropped because they were malformed
  std::uint64_t messages_forbidden = 0;  // messages whose sender was revoked or has a role that does not allow them
  // Times that a message waited, or was received as one over its sender's share, because others waited too.
  std::uint64_t peers_delayed = 0;
  KVFERRY_FIELDS(lookups, lookup_keys, lookup_hits, chunks_published, chunks_evicted, chunks_dropped, heartbeats,
                 nodes_registered, nodes_refused, nodes_expired, nodes_fenced, snapshots_wanted, messages_malformed,
                 messages_unregistered, replies_dropped, resends_wanted, digests_differed, orders_sent, messages_taken,
                 messages_sent, handshakes_refused, reports_malformed, messages_forbidden, peers_delayed);
};

struct NodeStatus : NodeInfo {
  std::uint64_t num_chunks = 0;  // number of chunks, tails included; a chunk counts once for each tier
  std::uint64_t num_tails = 0;
  // Time since the node's last Hello, Heartbeat, Publish, Evict or Lookup, or since the controller reloaded the node;
  // shorter if the lease was extended because of a late Directory::expire().
  std::uint64_t heartbeat_age_ms = 0;
  // Progress of a drain of this node.
  bool is_leaving = false;
  bool is_drained = false;  // no chunk is left to replicate
  std::uint64_t num_to_replicate = 0, num_replicated = 0, num_lost = 0;
  std::uint64_t load = 0;  // number of requests on the node
  // The node's wall clock minus the controller's, at the moment when the controller received the node's last heartbeat.
  // Negative: the node's clock was behind, or the heartbeat took that long to arrive. 0 also if the clocks were not
  // compared.
  std::int64_t clock_ahead_ms = 0;
  // The node's last report, and the time since its arrival; nullptr: no valid report has arrived. Copies of a status
  // share the report, which never changes.
  std::shared_ptr<NodeReport> report{};
  std::uint64_t report_age_ms = 0;
  KVFERRY_FIELDS(name_space, engine_id, incarnation, role, endpoint, num_chunks, num_tails, heartbeat_age_ms,
                 is_leaving, is_drained, num_to_replicate, num_replicated, num_lost, serves, load, fingerprint, version,
                 details, clock_ahead_ms, report, report_age_ms);
};

/// A node that was removed because it fell silent, and has not come back.
struct LostNode {
  NodeStatus node;                // the node's last status
  std::uint64_t lost_ago_ms = 0;  // time since the node's removal
  KVFERRY_FIELDS(node, lost_ago_ms);
};

/// What the controller stores in its state folder, whose contents outlive its process.
struct StateStatus {
  std::string folder;                // path of the state folder; empty: nothing is stored
  bool durable = false;              // acknowledged messages outlive the process
  std::string why_not;               // reason why `durable` is false
  std::uint64_t log_bytes = 0;       // size of the log that a restart would read after the snapshot
  std::uint64_t snapshot_bytes = 0;  // size of the newest snapshot; 0: none yet
  // Time since the newest snapshot ended or, if later, since the process started; 0 without a snapshot.
  std::uint64_t snapshot_age_ms = 0;
  std::uint64_t snapshots_written = 0;  // snapshots completed since the start
  std::uint64_t records_loaded = 0;     // records read at the start
  std::uint64_t load_ms = 0;
  KVFERRY_FIELDS(folder, durable, why_not, log_bytes, snapshot_bytes, snapshot_age_ms, snapshots_written,
                 records_loaded, load_ms);
};

struct ReplicaStatus {
  std::string name;
  std::string endpoint;
  KVFERRY_FIELDS(name, endpoint);
};

/// This controller as one of several replicas. If the address of etcd or of the event log is empty, the controller does
/// not use that service.
struct ScaleStatus {
  std::string name;                     // name of this replica
  std::vector<ReplicaStatus> replicas;  // live replicas, this one included
  std::string etcd;                     // addresses of etcd's members, without passwords; empty: none
  bool etcd_ok = false;
  std::uint64_t etcd_gone_ms = 0;  // how long etcd has been unreachable
  std::string etcd_trouble;        // etcd's last failure; cleared by the next success
  std::uint64_t etcd_owed = 0;     // number of keys whose value in etcd may be out of date
  bool name_taken = false;         // a replica that started later has the same name
  std::string event_log;           // address of the log in Redis, without a password; empty: none
  bool log_ok = false;
  std::string log_trouble;
  bool log_writer = false;          // this replica writes the log
  std::uint64_t log_lag_bytes = 0;  // size of the entries that Redis has not confirmed yet
  std::uint64_t log_appended = 0;   // entries that this replica wrote to the log
  std::uint64_t log_holes = 0;      // gaps where entries were dropped because the log did not accept them in time
  std::uint64_t log_read = 0;       // entries that this replica read from the log
  bool log_reading = false;         // this replica has started and is still reading the log
  KVFERRY_FIELDS(name, replicas, etcd, etcd_ok, etcd_gone_ms, etcd_trouble, etcd_owed, name_taken, event_log, log_ok,
                 log_trouble, log_writer, log_lag_bytes, log_appended, log_holes, log_read, log_reading);
};

struct Status {
  std::string version;
  std::uint64_t uptime_ms = 0;
  Counters counters;
  std::vector<NodeStatus> nodes;  // ordered by namespace, then engine id
  std::uint64_t num_pins = 0, num_pinned_keys = 0;
  StateStatus state{};
  ScaleStatus scale{};
  bool insecure = false;             // processes on other hosts can reach the controller without a cluster key
  std::vector<LostNode> lost{};      // at most 64 nodes lost in the last ten minutes, the last lost first
  std::string refusal{};             // reason of the last refusal that nodes_refused counts; empty: none yet
  std::uint64_t refusal_age_ms = 0;  // time since the last refusal
  std::int64_t wall_ms = 0;          // the controller's wall clock, in ms since 1970; 0: not reported
  KVFERRY_FIELDS(version, uptime_ms, counters, nodes, num_pins, num_pinned_keys, state, scale, insecure, lost, refusal,
                 refusal_age_ms, wall_ms);
};

/// Requests the status of the controller at `endpoint`, whose cluster key is `key`; blocks up to `timeout_ms`. Threads:
/// any. Errors: kInvalidArgument: `endpoint` is malformed, or is stream:// although there is a key; kUnavailable: no
/// answer came in time, or no connection can be opened; kRefused: the controller refused the request, e.g. because it
/// speaks another protocol version; kCorrupt: the answer can't be read or is of another kind.
Result<Status> fetch_status(const std::string& endpoint, std::int64_t timeout_ms,
                            const std::optional<net::ClusterKey>& key = {});

}  // namespace kvferry::controller
