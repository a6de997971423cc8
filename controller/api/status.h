// What a controller tells about itself: to `kvferry status`, to /metrics and to tests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/base/result.h"
#include "transport/base/wire.h"

namespace kvferry::controller {

/// Totals since the controller started. They only grow.
struct Counters {
  std::uint64_t lookups = 0;
  std::uint64_t lookup_keys = 0;       // full-chunk keys asked for
  std::uint64_t lookup_hits = 0;       // look-ups with at least one holder
  std::uint64_t chunks_published = 0;  // entries in publish messages, also those already known
  std::uint64_t chunks_evicted = 0;    // entries in evict messages, also those not known
  std::uint64_t chunks_dropped = 0;    // published beyond a bound on memory, so not kept
  std::uint64_t heartbeats = 0;
  std::uint64_t nodes_registered = 0;
  std::uint64_t nodes_refused = 0;
  std::uint64_t nodes_expired = 0;
  std::uint64_t nodes_fenced = 0;  // replaced by a newer incarnation
  std::uint64_t snapshots_wanted = 0;
  std::uint64_t messages_malformed = 0;
  std::uint64_t messages_unregistered = 0;  // from a connection that no registered node uses
  std::uint64_t replies_dropped = 0;        // the peer was gone, or did not read
  std::uint64_t resends_wanted = 0;
  std::uint64_t digests_differed = 0;  // nodes that held something else than they had told, seen by a heartbeat
  std::uint64_t orders_sent = 0;       // to nodes: to keep, forget or bring chunks
  std::uint64_t messages_taken = 0;    // of any kind and from anybody
  std::uint64_t messages_sent = 0;     // answers and orders that did not find a closed door
  KVFERRY_FIELDS(lookups, lookup_keys, lookup_hits, chunks_published, chunks_evicted, chunks_dropped, heartbeats,
                 nodes_registered, nodes_refused, nodes_expired, nodes_fenced, snapshots_wanted, messages_malformed,
                 messages_unregistered, replies_dropped, resends_wanted, digests_differed, orders_sent, messages_taken,
                 messages_sent);
};

struct NodeStatus {
  std::string name_space{};
  std::string engine_id{};
  std::uint64_t incarnation = 0;
  std::string role{};
  std::string endpoint{};
  std::uint64_t num_chunks = 0;  // tails included
  std::uint64_t num_tails = 0;
  std::uint64_t heartbeat_age_ms = 0;  // since the last word of any kind
  bool is_leaving = false;             // it is being drained:
  bool is_drained = false;             // whatever only it held is elsewhere or could not be moved
  std::uint64_t num_to_move = 0, num_moved = 0, num_lost = 0;
  std::string serves{};    // URL of its server for routers; empty: it tells none
  std::uint64_t load = 0;  // requests that it has
  std::string fingerprint{};
  std::string version{};  // of its kvferry; empty: one that tells none
  KVFERRY_FIELDS(name_space, engine_id, incarnation, role, endpoint, num_chunks, num_tails, heartbeat_age_ms,
                 is_leaving, is_drained, num_to_move, num_moved, num_lost, serves, load, fingerprint, version);
};

/// What outlives the controller's process.
struct StateStatus {
  std::string folder;                   // empty: nothing is kept
  bool durable = false;                 // what was acknowledged outlives the process
  std::string why_not;                  // where it is not durable
  std::uint64_t log_bytes = 0;          // what a restart would read, next to the snapshot
  std::uint64_t snapshot_bytes = 0;     // of the newest one; 0: none yet
  std::uint64_t snapshot_age_ms = 0;    // since it was complete; of one from before the restart, since the restart
  std::uint64_t snapshots_written = 0;  // since the start
  std::uint64_t records_loaded = 0;     // at the start
  std::uint64_t load_ms = 0;
  KVFERRY_FIELDS(folder, durable, why_not, log_bytes, snapshot_bytes, snapshot_age_ms, snapshots_written,
                 records_loaded, load_ms);
};

struct ReplicaStatus {
  std::string name;
  std::string endpoint;
  KVFERRY_FIELDS(name, endpoint);
};

/// What joins this controller with others; empty names: nothing does.
struct ScaleStatus {
  std::string name;                     // of this replica
  std::vector<ReplicaStatus> replicas;  // the living, this one too
  std::string etcd;                     // its members, without passwords; empty: none
  bool etcd_ok = false;
  std::uint64_t etcd_gone_ms = 0;  // for how long, where it is not ok
  std::string etcd_trouble;        // the last one, until something works again
  std::uint64_t etcd_owed = 0;     // keys that may have to be written there
  bool name_taken = false;         // by a replica that began later
  std::string event_log;           // where it is, without a password; empty: none
  bool log_ok = false;
  std::string log_trouble;
  bool log_writer = false;          // this replica appends
  std::uint64_t log_lag_bytes = 0;  // that are not confirmed yet
  std::uint64_t log_appended = 0;   // entries
  std::uint64_t log_holes = 0;      // times that the log could not take what came
  std::uint64_t log_read = 0;       // entries
  bool log_reading = false;         // as a late replica
  KVFERRY_FIELDS(name, replicas, etcd, etcd_ok, etcd_gone_ms, etcd_trouble, etcd_owed, name_taken, event_log, log_ok,
                 log_trouble, log_writer, log_lag_bytes, log_appended, log_holes, log_read, log_reading);
};

struct Status {
  std::string version;
  std::uint64_t uptime_ms = 0;
  Counters counters;
  std::vector<NodeStatus> nodes;  // by namespace, then engine id
  std::uint64_t num_holds = 0, num_held_keys = 0;
  StateStatus state{};
  ScaleStatus scale{};
  KVFERRY_FIELDS(version, uptime_ms, counters, nodes, num_holds, num_held_keys, state, scale);
};

/// Asks the controller at `endpoint`; blocks up to `timeout_ms`. Threads: any.
/// Errors: kInvalidArgument: not an endpoint; kUnavailable: no answer in time; kRefused: another protocol version.
Result<Status> fetch_status(const std::string& endpoint, std::int64_t timeout_ms);

}  // namespace kvferry::controller
