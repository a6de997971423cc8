// How ReplicatedState processes etcd's events.
#include <algorithm>

#include "controller/scale/replicated_state.h"
#include "controller/scale/shared_record.h"

namespace kvferry::controller::scale {
namespace {

constexpr std::size_t kReplicasMax = 256;  // the part of the limit on in_etcd_ that is meant for the replicas' own keys

}  // namespace

void ReplicatedState::on(const EtcdEvent& event, TimeNs now) {
  if (const auto* reply = std::get_if<EtcdReply>(&event)) return on_reply(*reply, now);
  if (const auto* all = std::get_if<EtcdAll>(&event)) return note_all(*all, now);
  if (const auto* lost = std::get_if<EtcdLost>(&event)) {
    is_synced_ = false;
    if (!gone_since_) gone_since_ = now;
    error_ = lost->reason;
    return;
  }
  for (const auto& change : std::get<EtcdChanges>(event).changes) {
    if (const auto* pair = std::get_if<EtcdPair>(&change)) {
      note_value(*pair, now);
    } else {
      const auto& erased = std::get<EtcdErased>(change);
      if (!note_absent(erased.key, erased.revision, true)) continue;
      // A replica erases a node's key if the node has been gone for long. If the node is registered at this replica,
      // the key is written again, because note_absent() marked it as dirty.
      const std::optional<NodeName> name = node_of(erased.key);
      if (!name) continue;
      const auto node = nodes_.find(*name);
      if (node != nodes_.end() && !node->second.is_here) nodes_.erase(node);
    }
  }
}

void ReplicatedState::on_reply(const EtcdReply& reply, TimeNs now) {
  const auto it = in_flight_.find(reply.token);
  if (it == in_flight_.end()) return;
  const auto [key, request] = std::move(it->second);
  in_flight_.erase(it);
  if (key.empty()) {
    is_lease_requested_ = false;
  } else if (const auto owed = dirty_.find(key); owed != dirty_.end()) {
    owed->second = false;
  }
  if (reply.error) return on_failure(key, request, *reply.error, now);
  retry_ms_ = options_.retry_ms_min;
  if (is_synced_) error_.clear();
  if (key.empty()) {
    const bool has_one = reply.ttl_s > 0;
    lease_ = has_one ? reply.lease : 0;
    lease_at_ = has_one ? now + options_.lease_s * kSecond / 3 : now;
    return mark_dirty(own_key());
  }
  if (std::holds_alternative<EtcdGrant>(request)) {
    if (const auto own = own_.find(key); own != own_.end()) own->second.lease = reply.lease;
    return;
  }
  const auto* put = std::get_if<EtcdPut>(&request);
  const std::int64_t expected = put != nullptr ? put->pair.mod_revision : std::get<EtcdErase>(request).mod_revision;
  if (reply.done) {
    if (put == nullptr) {
      note_absent(key, reply.revision, false);
      return;
    }
    return note_value({key, put->pair.value, reply.revision, put->pair.lease}, now);
  }
  // The cached value was wrong. Unless a later event has replaced it, the reply's value is used, even if its revision
  // is older than the cached one.
  const auto known = in_etcd_.find(key);
  if (known != in_etcd_.end() && !known->second.is_gone && known->second.mod_revision == expected)
    known->second.mod_revision = 0;
  if (reply.found) return note_value(*reply.found, now);
  note_absent(key, reply.revision, false);
}

void ReplicatedState::on_failure(const std::string& key, const EtcdRequest& request, const Error& error, TimeNs now) {
  error_ = error.what;
  const auto* put = std::get_if<EtcdPut>(&request);
  if (error.code == ErrorCode::kNotFound && (put != nullptr || key.empty())) {
    // The lease has expired, or etcd has lost its data.
    if (key.empty() || key == own_key()) {
      if (put == nullptr || put->pair.lease == lease_) lease_ = 0;
      if (!is_lease_requested_) lease_at_ = now;
    } else if (const auto own = own_.find(key); own != own_.end()) {
      own->second.lease = 0;
    }
    if (!key.empty()) return;
  }
  const TimeNs again = now + retry_ms_ * kMillisecond;
  if (key.empty()) {
    lease_at_ = again;
  } else {
    retry_at_ = again;
  }
  retry_ms_ = std::min(retry_ms_ * 2, options_.retry_ms_max);
}

void ReplicatedState::note_all(const EtcdAll& all, TimeNs now) {
  is_synced_ = true;
  gone_since_.reset();
  error_.clear();
  retry_at_ = now;
  in_etcd_.clear();
  news_.emplace_back(ReplicasChanged{});
  for (const EtcdPair& pair : all.pairs) note_value(pair, now);
  // Etcd may have lost data, so the keys of all nodes and of this replica's own records must be checked.
  mark_dirty(own_key());
  for (const auto& [name, node] : nodes_) mark_dirty(node_key(name));
  for (const auto& [key, own] : own_) mark_dirty(key);
  // Records of other replicas that are no longer in etcd are dropped.
  std::erase_if(records_, [&](const auto& entry) {
    return value_in_etcd(entry.first) == nullptr && !own_.contains(entry.first);
  });
}

void ReplicatedState::note_value(const EtcdPair& pair, TimeNs now) {
  const auto it = in_etcd_.find(pair.key);
  if (it != in_etcd_.end() && it->second.mod_revision >= pair.mod_revision) return;
  if (it == in_etcd_.end() && in_etcd_.size() >= options_.nodes_max + options_.records_max + kReplicasMax) return;
  EtcdValue& known = in_etcd_[pair.key];
  known = {pair.value, pair.mod_revision, pair.lease, false};
  apply(pair.key, known, now);
}

bool ReplicatedState::note_absent(const std::string& key, std::int64_t revision, bool is_by_watch) {
  const auto it = in_etcd_.find(key);
  if (it == in_etcd_.end()) return true;
  const bool was_there = !it->second.is_gone;
  if (was_there && it->second.mod_revision > revision) return false;
  const std::uint64_t version = record_fields_of(it->second.value).version;
  if (is_by_watch) {
    in_etcd_.erase(it);
  } else {
    // The watch may still deliver an older put, so the key is marked as gone until the watch delivers the erasure.
    it->second = {.value = {}, .mod_revision = revision, .lease = 0, .is_gone = true};
  }
  if (!was_there) return true;
  if (key.starts_with(options_.prefix + "replicas/")) {
    if (key == own_key()) is_name_taken_ = false;
    news_.emplace_back(ReplicasChanged{});
  } else if (!node_of(key)) {
    // The record is dropped. A record of this replica is dropped only if the watch reports the erasure and this replica
    // has not set a newer version meanwhile. note_all() handles records that etcd lost.
    const auto own = own_.find(key);
    if (own != own_.end() && is_by_watch && own->second.record.version <= version) own_.erase(own);
    if (!own_.contains(key)) records_.erase(key);
  }
  mark_dirty(key);
  return true;
}

void ReplicatedState::apply(const std::string& key, const EtcdValue& value, TimeNs now) {
  if (key.starts_with(options_.prefix + "replicas/")) {
    if (key == own_key()) is_name_taken_ = number_of(value.value) > options_.run;
    news_.emplace_back(ReplicasChanged{});
  } else if (const std::optional<NodeName> name = node_of(key)) {
    const std::uint64_t incarnation = number_of(value.value);
    const auto [node, is_new] =
        nodes_.try_emplace(*name, Node{.newest = incarnation, .is_here = false, .alive_at = now});
    if (is_new || incarnation > node->second.newest) {
      node->second = {.newest = incarnation, .is_here = false, .alive_at = now};
      news_.emplace_back(NodeFenced{*name, Incarnation{incarnation}});
    }
  } else {
    apply_record(key, value, now);
  }
  mark_dirty(key);
}

void ReplicatedState::apply_record(const std::string& key, const EtcdValue& value, TimeNs now) {
  const std::string begin = options_.prefix + "records/";
  const std::size_t slash = key.find('/', begin.size());
  if (!key.starts_with(begin) || slash == std::string::npos) return;
  RecordFields fields = record_fields_of(value.value);
  const auto known = records_.find(key);
  if (known == records_.end() && records_.size() >= options_.records_max) return;
  const auto is_news_to = [&](const SharedRecord& record) {
    // If two replicas set a record at the same time, the value that reached etcd first is valid.
    const bool differs = record.owner != fields.owner || record.value != fields.value;
    return fields.version > record.version || (fields.version == record.version && differs);
  };
  if (known != records_.end() && !is_news_to(known->second)) return;
  const auto own = own_.find(key);
  if (own != own_.end() && !is_news_to(own->second.record)) return;
  if (own != own_.end()) own_.erase(own);
  const auto left = static_cast<TimeNs>(std::min<std::uint64_t>(fields.left_ms, std::uint64_t{1} << 40));
  records_[key] = {key.substr(begin.size(), slash - begin.size()),
                   key.substr(slash + 1),
                   std::move(fields.owner),
                   std::move(fields.value),
                   fields.version,
                   now + left * kMillisecond};
  news_.emplace_back(RecordSet{records_[key]});
}

}  // namespace kvferry::controller::scale
