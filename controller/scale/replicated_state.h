// The state that the replicas of a controller share through etcd and that each replica caches: the other replicas, the
// newest incarnation of each node that any replica has seen, and records (quotas). Pure: the caller passes etcd's
// events in and sends the requests.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "controller/scale/etcd_messages.h"
#include "transport/base/clock.h"
#include "transport/base/ids.h"

namespace kvferry::controller::scale {

struct ReplicatedStateOptions {
  std::string prefix = "kvferry/";  // prefix of all keys in etcd
  std::string name{};               // this replica's name
  std::string endpoint{};           // address of this replica's listener for nodes
  std::uint64_t run = 0;  // grows with each start; if replicas share a name, the one with the highest run owns the name
  std::int64_t lease_s = 5;         // lease of this replica; when it expires, the other replicas consider this one dead
  std::int64_t retry_ms_min = 100;  // pause after a failed request; it doubles with each failure
  std::int64_t retry_ms_max = 2000;
  std::int64_t keep_ms = 3'600'000;  // how long a node's incarnation is kept after the node was last alive
  std::size_t nodes_max = 16'384;    // number of known nodes above which nodes that are gone are dropped
  std::size_t records_max = 16'384;
  std::size_t in_flight_max = 16;
};

struct NodeName {
  std::string name_space;
  std::string engine_id;
  auto operator<=>(const NodeName&) const = default;
};

struct Replica {
  std::string name;
  std::string endpoint;
  auto operator<=>(const Replica&) const = default;
};

/// A value with an owner and a deadline that all replicas must know, such as a quota. ReplicatedState does not
/// interpret it.
struct SharedRecord {
  std::string kind;  // kind of the record; must not contain '/'
  std::string id;
  std::string owner;
  std::string value;
  std::uint64_t version = 0;  // the highest version of a record is the valid one
  TimeNs deadline = 0;        // time at which the record expires, on this replica's clock
};

/// News: etcd has this incarnation of the node, so older incarnations must be removed (fenced).
struct NodeFenced {
  NodeName node;
  Incarnation incarnation;
};
struct ReplicasChanged {};
struct RecordSet {
  SharedRecord record;
};
using SharedNews = std::variant<NodeFenced, ReplicasChanged, RecordSet>;

/// The state that the replicas share. While etcd is unreachable, the cached state stays valid. Changed keys are marked
/// dirty and written when etcd is back, even if etcd has lost all its data. Threads: one at a time. `now` must not
/// decrease.
class ReplicatedState {
 public:
  explicit ReplicatedState(ReplicatedStateOptions options);

  /// Returns the newest incarnation of the node that any replica is known to have seen.
  std::optional<Incarnation> newest(const NodeName& node) const;
  /// Records that the node registered at this replica. The caller must have refused incarnations older than newest().
  void joined(const NodeName& node, Incarnation incarnation, TimeNs now);
  /// Records that the node left, expired or was fenced at this replica.
  void left(const NodeName& node, TimeNs now);

  /// Sets a record, or replaces the one with the same kind and id, at once in this replica. In all replicas that reach
  /// etcd, the record expires within about a second of its deadline. kFull: the record is new, and records_max records
  /// exist. kInvalidArgument: the record has no valid kind, or its deadline has passed.
  Result<void> set(SharedRecord record, TimeNs now);

  void on(const EtcdEvent& event, TimeNs now);

  struct Request {
    std::uint64_t token;
    EtcdRequest request;
  };
  /// Returns the requests to send to etcd now. The caller must call due() often, because these requests also renew this
  /// replica's lease.
  std::vector<Request> due(TimeNs now);
  std::vector<SharedNews> take_news();
  /// Returns the request to send at shutdown; nullopt if this replica has no lease. The request revokes this replica's
  /// lease, so that the other replicas remove this replica at once.
  std::optional<EtcdRequest> final_request() const;

  /// Returns this replica and all replicas with a lease in etcd, ordered by name. While etcd is unreachable, returns
  /// the last known list.
  std::vector<Replica> replicas() const;
  /// Returns the valid records by their keys in etcd.
  const std::map<std::string, SharedRecord>& records() const { return records_; }
  /// Returns when etcd became unreachable; 0 if it was never reachable; nullopt while it is reachable.
  std::optional<TimeNs> etcd_gone_since() const { return gone_since_; }
  const std::string& etcd_error() const { return error_; }
  /// Returns true if a replica with this name was started later and owns the name now.
  bool is_name_taken() const { return is_name_taken_; }
  std::size_t num_dirty() const { return dirty_.size(); }
  std::size_t num_nodes() const { return nodes_.size(); }

 private:
  struct EtcdValue {
    std::string value;
    std::int64_t mod_revision = 0;
    std::int64_t lease = 0;
    bool is_gone = false;  // the key did not exist at mod_revision
  };
  struct Node {
    std::uint64_t newest = 0;
    bool is_here = false;
    TimeNs alive_at = 0;  // time when the node was last known to be alive
  };
  struct OwnRecord {  // a record that this replica set, by a call of set()
    SharedRecord record;
    std::int64_t lease = 0;
  };
  /// The value that a key should have in etcd.
  struct DesiredValue {
    std::optional<std::string> value{};  // the desired value; none: the key should not exist
    std::int64_t lease = 0;
  };

  std::string own_key() const;
  std::string own_value() const;
  std::string node_key(const NodeName& node) const;
  std::optional<NodeName> node_of(const std::string& key) const;
  std::string record_key(const std::string& kind, const std::string& id) const;
  void mark_dirty(const std::string& key) { dirty_.try_emplace(key, false); }

  // The following functions process etcd's events; they are in etcd_replicated_state.cpp.
  void on_reply(const EtcdReply& reply, TimeNs now);
  void on_failure(const std::string& key, const EtcdRequest& request, const Error& error, TimeNs now);
  void note_all(const EtcdAll& all, TimeNs now);
  void note_value(const EtcdPair& pair, TimeNs now);
  /// Returns false, without any change, if a newer value of the key is known.
  bool note_absent(const std::string& key, std::int64_t revision, bool is_by_watch);
  void apply(const std::string& key, const EtcdValue& value, TimeNs now);
  void apply_record(const std::string& key, const EtcdValue& value, TimeNs now);
  const EtcdValue* value_in_etcd(const std::string& key) const;

  std::optional<DesiredValue> desired(const std::string& key, TimeNs now) const;
  std::optional<EtcdRequest> next_request(const std::string& key, TimeNs now);
  void keep_lease(std::vector<Request>& requests, TimeNs now);
  void sweep(TimeNs now);
  void send(std::vector<Request>& requests, const std::string& key, EtcdRequest request);

  ReplicatedStateOptions options_;
  std::map<std::string, EtcdValue> in_etcd_;  // the last known contents of etcd
  std::map<NodeName, Node> nodes_;
  std::map<std::string, OwnRecord> own_;  // own records by their keys in etcd
  std::map<std::string, SharedRecord> records_;
  std::map<std::string, bool> dirty_;  // keys whose value in etcd may be wrong; true: a request is in flight
  std::map<std::uint64_t, std::pair<std::string, EtcdRequest>>
      in_flight_;  // requests by token, each with its key in etcd; key "": this replica's lease
  std::vector<SharedNews> news_;
  std::uint64_t last_token_ = 0;
  std::int64_t lease_ = 0;  // this replica's lease; 0: none
  bool is_lease_requested_ = false;
  TimeNs lease_at_ = 0;  // time of the next request for the lease
  bool is_synced_ = false;
  std::optional<TimeNs> gone_since_{0};
  std::string error_ = "etcd has not replied yet";
  TimeNs retry_at_ = 0;
  std::int64_t retry_ms_;
  bool is_name_taken_ = false;
  NodeName swept_last_;
  TimeNs swept_at_ = 0;
  std::string looked_last_;  // key of dirty_ after which due() continues
};

}  // namespace kvferry::controller::scale
