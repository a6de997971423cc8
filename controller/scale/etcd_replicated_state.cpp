// ReplicatedState's ears: what etcd tells, and what it means.
#include <algorithm>

#include "controller/scale/shared_record.h"
#include "controller/scale/replicated_state.h"

namespace kvferry::controller::scale {
namespace {

constexpr std::size_t kReplicasMax = 256;  // beyond what anybody runs

}  // namespace

void ReplicatedState::on(const EtcdEvent& event, TimeNs now) {
  if (const auto* reply = std::get_if<EtcdReply>(&event)) return on_reply(*reply, now);
  if (const auto* all = std::get_if<EtcdAll>(&event)) return see_all(*all, now);
  if (const auto* lost = std::get_if<EtcdLost>(&event)) {
    is_synced_ = false;
    if (!gone_since_) gone_since_ = now;
    trouble_ = lost->reason;
    return;
  }
  for (const auto& change : std::get<EtcdChanges>(event).changes) {
    if (const auto* pair = std::get_if<EtcdPair>(&change)) {
      see(*pair, now);
    } else {
      const auto& erased = std::get<EtcdErased>(change);
      unsee(erased.key, erased.revision, true);
      // Who erases a node's has judged that it is dead for long; where it lives, that was wrong.
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
    asks_lease_ = false;
  } else if (const auto owed = owed_.find(key); owed != owed_.end()) {
    owed->second = false;
  }
  if (reply.error) return on_failure(key, request, *reply.error, now);
  retry_ms_ = options_.retry_ms_min;
  if (is_synced_) trouble_.clear();
  if (key.empty()) {
    const bool has_one = reply.ttl_s > 0;
    lease_ = has_one ? reply.lease : 0;
    lease_at_ = has_one ? now + options_.lease_s * kSecond / 3 : now;
    return owe(own_key());
  }
  if (std::holds_alternative<EtcdGrant>(request)) {
    if (const auto own = own_.find(key); own != own_.end()) own->second.lease = reply.lease;
    return;
  }
  const auto* put = std::get_if<EtcdPut>(&request);
  const std::int64_t expected = put != nullptr ? put->pair.mod_revision : std::get<EtcdErase>(request).mod_revision;
  if (reply.done) {
    if (put == nullptr) return unsee(key, reply.revision, false);
    return see({key, put->pair.value, reply.revision, put->pair.lease}, now);
  }
  // What was believed was wrong; unless more has been heard since, what stands there is the news, also if it is older.
  const auto known = seen_.find(key);
  if (known != seen_.end() && !known->second.is_gone && known->second.mod_revision == expected)
    known->second.mod_revision = 0;
  if (reply.found) return see(*reply.found, now);
  unsee(key, reply.revision, false);
}

void ReplicatedState::on_failure(const std::string& key, const EtcdRequest& request, const Error& error, TimeNs now) {
  trouble_ = error.what;
  const auto* put = std::get_if<EtcdPut>(&request);
  if (error.code == ErrorCode::kNotFound && (put != nullptr || key.empty())) {
    // The lease ran out: this replica was silent for too long, or etcd has lost everything.
    if (key.empty() || key == own_key()) {
      if (put == nullptr || put->pair.lease == lease_) lease_ = 0;
      if (!asks_lease_) lease_at_ = now;
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

void ReplicatedState::see_all(const EtcdAll& all, TimeNs now) {
  is_synced_ = true;
  gone_since_.reset();
  trouble_.clear();
  retry_at_ = now;
  seen_.clear();
  news_.emplace_back(ReplicasChanged{});
  for (const EtcdPair& pair : all.pairs) see(pair, now);
  // What etcd does not know any more: nodes and this replica's own records have to be written again ...
  owe(own_key());
  for (const auto& [name, node] : nodes_) owe(node_key(name));
  for (const auto& [key, own] : own_) owe(key);
  // ... and other replicas' records have been erased, or were lost with etcd's data.
  std::vector<std::string> lost;
  for (const auto& [key, record] : records_) {
    if (seen(key) == nullptr && !own_.contains(key)) lost.push_back(key);
  }
  for (const std::string& key : lost) forget_record(key);
}

void ReplicatedState::see(const EtcdPair& pair, TimeNs now) {
  const auto it = seen_.find(pair.key);
  if (it != seen_.end() && it->second.mod_revision >= pair.mod_revision) return;
  if (it == seen_.end() && seen_.size() >= options_.nodes_max + options_.records_max + kReplicasMax) return;
  Seen& now_seen = seen_[pair.key];
  now_seen = {pair.value, pair.mod_revision, pair.lease, false};
  interpret(pair.key, now_seen, now);
}

void ReplicatedState::unsee(const std::string& key, std::int64_t revision, bool is_by_watch) {
  const auto it = seen_.find(key);
  if (it == seen_.end()) return;
  const bool was_there = !it->second.is_gone;
  if (was_there && it->second.mod_revision > revision) return;
  const std::uint64_t version = record_fields_of(it->second.value).version;
  if (is_by_watch) {
    seen_.erase(it);
  } else {
    // The watch may still tell of a put from before, so a mark stays until it tells of this too.
    it->second = {.value = {}, .mod_revision = revision, .lease = 0, .is_gone = true};
  }
  if (!was_there) return;
  if (key.starts_with(options_.prefix + "replicas/")) {
    if (key == own_key()) is_name_taken_ = false;
    news_.emplace_back(ReplicasChanged{});
  } else if (!node_of(key)) {
    // Somebody erased it, unless this replica has replaced it meanwhile. (What was lost shows in EtcdAll.)
    const auto own = own_.find(key);
    if (own != own_.end() && is_by_watch && own->second.record.version <= version) own_.erase(own);
    if (!own_.contains(key)) forget_record(key);
  }
  owe(key);
}

void ReplicatedState::interpret(const std::string& key, const Seen& seen, TimeNs now) {
  if (key.starts_with(options_.prefix + "replicas/")) {
    if (key == own_key()) is_name_taken_ = number_of(seen.value) > options_.run;
    news_.emplace_back(ReplicasChanged{});
  } else if (const std::optional<NodeName> name = node_of(key)) {
    const std::uint64_t incarnation = number_of(seen.value);
    const auto [node, is_new] =
        nodes_.try_emplace(*name, Node{.newest = incarnation, .is_here = false, .alive_at = now});
    if (is_new || incarnation > node->second.newest) {
      node->second = {.newest = incarnation, .is_here = false, .alive_at = now};
      news_.emplace_back(NodeFenced{*name, Incarnation{incarnation}});
    }
  } else {
    interpret_record(key, seen, now);
  }
  owe(key);
}

void ReplicatedState::interpret_record(const std::string& key, const Seen& seen, TimeNs now) {
  const std::string begin = options_.prefix + "records/";
  const std::size_t slash = key.find('/', begin.size());
  if (!key.starts_with(begin) || slash == std::string::npos) return;
  RecordFields fields = record_fields_of(seen.value);
  const auto known = records_.find(key);
  if (known == records_.end() && records_.size() >= options_.records_max) return;
  const auto is_news_to = [&](const SharedRecord& record) {
    // Of two that were set at a time, the one that reached etcd counts.
    const bool differs = record.owner != fields.owner || record.value != fields.value;
    return fields.version > record.version || (fields.version == record.version && differs);
  };
  if (known != records_.end() && !is_news_to(known->second)) return;
  const auto own = own_.find(key);
  if (own != own_.end() && own->second.is_erased && own->second.record.version >= fields.version) return;
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
