// What the replicas of a controller share, and each keeps in memory: who else is there, the newest incarnation of each
// node that any of them saw, and records (pins, drains, quotas). Pure: requests to etcd go out, its events come in.
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

struct SharedTruthOptions {
  std::string prefix = "kvferry/";  // of all keys
  std::string name{};               // of this replica; one that starts anew under it takes its place
  std::string endpoint{};           // where nodes reach it
  std::uint64_t run = 0;            // of two that use one name at a time, the higher one has it
  std::int64_t lease_s = 5;         // of this replica; the others take it for gone after it
  std::int64_t retry_ms_min = 100;  // after a request that failed; doubles
  std::int64_t retry_ms_max = 2000;
  std::int64_t keep_ms = 3'600'000;  // how long a node's incarnation is known after the node was last alive
  std::size_t nodes_max = 16'384;    // whose incarnation is known; beyond it those longest dead are forgotten
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

/// Something with an owner and a deadline that all replicas must know: a pin, a drain, a quota. What it means is its
/// kind's business.
struct SharedRecord {
  std::string kind;  // no '/'
  std::string id;
  std::string owner;
  std::string value;
  std::uint64_t version = 0;  // the highest wins
  TimeNs deadline = 0;        // by this replica's clock
};

/// Another replica has seen this incarnation: an older one is not to be served any more.
struct NodeFenced {
  NodeName node;
  Incarnation incarnation;
};
struct ReplicasChanged {};
struct RecordSet {
  SharedRecord record;
};
struct RecordGone {
  std::string kind;
  std::string id;
};
using SharedNews = std::variant<NodeFenced, ReplicasChanged, RecordSet, RecordGone>;

/// Etcd that is gone changes nothing of what is known, and holds nobody up: what has to be written there is owed, and
/// written when it is back, also to one that has lost everything.
/// Threads: one at a time. `now` must never go back.
class ReplicatedState {
 public:
  explicit ReplicatedState(SharedTruthOptions options);

  /// The newest incarnation of it that any replica saw, as far as is known here.
  std::optional<Incarnation> newest(const NodeName& node) const;
  /// It registered here; an older incarnation than newest() has been refused before.
  void joined(const NodeName& node, Incarnation incarnation, TimeNs now);
  /// It left, expired or was fenced here.
  void left(const NodeName& node, TimeNs now);

  /// Replaces one of the same kind and id. Known here at once. Gone at its deadline everywhere, at the latest one
  /// lease's granularity (a second) later.
  Result<void> set(SharedRecord record, TimeNs now);
  void erase(const std::string& kind, const std::string& id);

  void on(const EtcdEvent& event, TimeNs now);

  struct Request {
    std::uint64_t token;
    EtcdRequest request;
  };
  /// What to ask of etcd now; to be called often.
  std::vector<Request> due(TimeNs now);
  std::vector<SharedNews> take_news();
  /// On the way out: the others need not wait for the lease.
  std::optional<EtcdRequest> goodbye() const;

  /// This one, and those whose lease etcd holds; while etcd is gone, as it was then. By name.
  std::vector<Replica> replicas() const;
  /// By key, all that count.
  const std::map<std::string, SharedRecord>& records() const { return records_; }
  /// When it was lost, or this replica began; nullopt: it is there.
  std::optional<TimeNs> etcd_gone_since() const { return gone_since_; }
  const std::string& etcd_trouble() const { return trouble_; }
  /// Another replica with this name has begun later: it is known under the name in place of this one.
  bool is_name_taken() const { return is_name_taken_; }
  std::size_t num_owed() const { return owed_.size(); }
  std::size_t num_nodes() const { return nodes_.size(); }

 private:
  struct Seen {
    std::string value;
    std::int64_t mod_revision = 0;
    std::int64_t lease = 0;
    bool is_gone = false;  // erased at mod_revision
  };
  struct Node {
    std::uint64_t newest = 0;
    bool is_here = false;
    TimeNs alive_at = 0;  // last, or when it was first heard of
  };
  struct Own {  // a record that was set here
    SharedRecord record;
    std::int64_t lease = 0;
    bool is_erased = false;
  };
  /// What a key should be in etcd.
  struct DesiredValue {
    std::optional<std::string> value{};  // none: not there
    std::int64_t lease = 0;
  };

  std::string own_key() const;
  std::string own_value() const;
  std::string node_key(const NodeName& node) const;
  std::optional<NodeName> node_of(const std::string& key) const;
  std::string record_key(const std::string& kind, const std::string& id) const;
  void owe(const std::string& key) { owed_.try_emplace(key, false); }

  // etcd_truth.cpp: what is seen there, and what it means.
  void on_reply(const EtcdReply& reply, TimeNs now);
  void on_failure(const std::string& key, const EtcdRequest& request, const Error& error, TimeNs now);
  void see_all(const EtcdAll& all, TimeNs now);
  void see(const EtcdPair& pair, TimeNs now);
  void unsee(const std::string& key, std::int64_t revision, bool is_by_watch);
  void interpret(const std::string& key, const Seen& seen, TimeNs now);
  void interpret_record(const std::string& key, const Seen& seen, TimeNs now);
  void forget_record(const std::string& key);
  const Seen* seen(const std::string& key) const;

  std::optional<DesiredValue> wish(const std::string& key, TimeNs now) const;
  std::optional<EtcdRequest> step(const std::string& key, TimeNs now);
  void keep_lease(std::vector<Request>& requests, TimeNs now);
  void sweep(TimeNs now);
  void send(std::vector<Request>& requests, const std::string& key, EtcdRequest request);

  SharedTruthOptions options_;
  std::map<std::string, Seen> seen_;  // by key: what stands in etcd
  std::map<NodeName, Node> nodes_;
  std::map<std::string, Own> own_;  // by key
  std::map<std::string, SharedRecord> records_;
  std::map<std::string, bool> owed_;  // keys that may have to be written; true: a request is under way
  std::map<std::uint64_t, std::pair<std::string, EtcdRequest>> in_flight_;  // by token; key "": this replica's lease
  std::vector<SharedNews> news_;
  std::uint64_t last_token_ = 0;
  std::int64_t lease_ = 0;  // of this replica; 0: none
  bool asks_lease_ = false;
  TimeNs lease_at_ = 0;  // when to ask for it again
  bool is_synced_ = false;
  std::optional<TimeNs> gone_since_{0};
  std::string trouble_ = "not reached yet";
  TimeNs retry_at_ = 0;
  std::int64_t retry_ms_;
  bool is_name_taken_ = false;
  NodeName swept_last_;
  TimeNs swept_at_ = 0;
  std::string looked_last_;  // in owed_
};

}  // namespace kvferry::controller::scale
