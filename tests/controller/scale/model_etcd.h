// A model of etcd in virtual time: keys with revisions, leases, watches, and all faults on the way to it.
#pragma once

#include <map>
#include <random>
#include <string>
#include <vector>

#include "controller/scale/etcd_messages.h"
#include "transport/base/clock.h"

namespace kvferry::controller::scale {

class ModelEtcd {
 public:
  using Change = std::variant<EtcdPair, EtcdErased>;

  EtcdReply execute(const EtcdRequest& request, TimeNs now) {
    EtcdReply reply;
    if (const auto* grant = std::get_if<EtcdGrant>(&request)) {
      leases_[++last_lease_] = {grant->ttl_s, now + grant->ttl_s * kSecond};
      reply.lease = last_lease_;
      reply.ttl_s = grant->ttl_s;
    } else if (const auto* keep = std::get_if<EtcdKeepAlive>(&request)) {
      reply.lease = keep->lease;
      if (const auto lease = leases_.find(keep->lease); lease != leases_.end()) {
        lease->second.second = now + lease->second.first * kSecond;
        reply.ttl_s = lease->second.first;
      }
    } else if (const auto* revoke = std::get_if<EtcdRevoke>(&request)) {
      end_lease(revoke->lease);
    } else if (const auto* put = std::get_if<EtcdPut>(&request)) {
      if (put->pair.lease != 0 && !leases_.contains(put->pair.lease)) {
        reply.error = Error{ErrorCode::kNotFound, "lease not found"};
      } else if (reply.done = matches(put->pair.key, put->pair.mod_revision, reply); reply.done) {
        EtcdPair pair = put->pair;
        pair.mod_revision = ++revision_;
        pairs_[pair.key] = pair;
        history_.emplace_back(revision_, pair);
      }
    } else {
      const auto& erase = std::get<EtcdErase>(request);
      if (reply.done = matches(erase.key, erase.mod_revision, reply); reply.done) erase_now(erase.key);
    }
    reply.revision = revision_;
    return reply;
  }
  void expire(TimeNs now) {
    if (!is_up_) return;
    std::vector<std::int64_t> ended;
    for (const auto& [id, lease] : leases_) {
      if (lease.second < now) ended.push_back(id);
    }
    for (const std::int64_t id : ended) end_lease(id);
  }
  void set_up(bool is_up) { is_up_ = is_up; }
  bool is_up() const { return is_up_; }
  void wipe() {
    pairs_.clear();
    leases_.clear();
    history_.clear();
    revision_ = 1;
    compacted_ = 1;
    ++life_;
  }
  void compact() {
    compacted_ = revision_;
    history_.clear();
  }
  std::int64_t revision() const { return revision_; }
  std::int64_t compacted() const { return compacted_; }
  std::uint64_t life() const { return life_; }  // changes when etcd loses its data and breaks all watches
  std::size_t num_keys() const { return pairs_.size(); }
  EtcdAll all() const {
    EtcdAll all{.pairs = {}, .revision = revision_};
    for (const auto& [key, pair] : pairs_) all.pairs.push_back(pair);
    return all;
  }
  EtcdChanges since(std::int64_t revision) const {
    EtcdChanges changes;
    for (const auto& [at, change] : history_) {
      if (at > revision) changes.changes.push_back(change);
    }
    return changes;
  }

 private:
  bool matches(const std::string& key, std::int64_t mod_revision, EtcdReply& reply) const {
    const auto it = pairs_.find(key);
    if (it != pairs_.end() && it->second.mod_revision != mod_revision) reply.found = it->second;
    return (it == pairs_.end() ? 0 : it->second.mod_revision) == mod_revision;
  }
  void erase_now(const std::string& key) {
    if (pairs_.erase(key) > 0) {
      ++revision_;
      history_.emplace_back(revision_, EtcdErased{key, revision_});
    }
  }
  void end_lease(std::int64_t id) {
    leases_.erase(id);
    std::vector<std::string> keys;
    for (const auto& [key, pair] : pairs_) {
      if (pair.lease == id) keys.push_back(key);
    }
    for (const std::string& key : keys) erase_now(key);
  }

  bool is_up_ = true;
  std::map<std::string, EtcdPair> pairs_;
  std::map<std::int64_t, std::pair<std::int64_t, TimeNs>> leases_;  // lease id -> (seconds, end)
  std::vector<std::pair<std::int64_t, Change>> history_;
  std::int64_t revision_ = 1;
  std::int64_t compacted_ = 1;
  std::int64_t last_lease_ = 0;
  std::uint64_t life_ = 1;
};

/// One replica's connection to the model, as in controller/scale/etcd.h. Replies and changes come late, each kind in
/// its own order.
class ModelLink {
 public:
  ModelLink(ModelEtcd& etcd, std::uint64_t seed) : etcd_(etcd), random_(seed) {}

  void set_up(bool is_up) { is_up_ = is_up; }
  /// The replica has died.
  void drop() {
    asked_.clear();
    arriving_.clear();
    watched_.reset();
    is_lost_ = false;
  }
  void ask(std::uint64_t token, EtcdRequest request, TimeNs now) {
    asked_.emplace_back(now + dice(100) * kMillisecond, std::pair(token, std::move(request)));
  }
  std::vector<EtcdEvent> take(TimeNs now) {
    while (!asked_.empty() && asked_.front().first <= now) {
      const auto [token, request] = std::move(asked_.front().second);
      asked_.erase(asked_.begin());
      const bool is_there = is_up_ && etcd_.is_up();
      const bool is_answer_lost = dice(20) == 0;
      EtcdReply reply;
      if (is_there) reply = etcd_.execute(request, now);
      // Without an answer, the replica can't know whether the request was executed.
      if (!is_there || is_answer_lost) reply = {.error = Error{ErrorCode::kUnavailable, "no answer"}};
      reply.token = token;
      arriving_.emplace_back(now + dice(60) * kMillisecond, std::move(reply));
    }
    watch(now);
    std::vector<EtcdEvent> events;
    std::erase_if(arriving_, [&](auto& entry) {
      // Events come in order of time. Events of the same time may overtake each other, as with two threads, except
      // those of one watch.
      if (entry.first > now) return false;
      events.push_back(std::move(entry.second));
      return true;
    });
    return events;
  }

 private:
  TimeNs dice(std::uint64_t n) { return static_cast<TimeNs>(random_() % n); }
  void watch(TimeNs now) {
    const bool is_broken = !is_up_ || !etcd_.is_up() || (watched_ && life_ != etcd_.life());
    watch_at_ = std::max(watch_at_, now + dice(60) * kMillisecond);
    if (is_broken) {
      watched_.reset();
      if (!is_lost_) arriving_.emplace_back(watch_at_, EtcdLost{"no watch"});
      is_lost_ = true;
    } else if (!watched_ || *watched_ < etcd_.compacted()) {
      if (dice(10) != 0) return;
      is_lost_ = false;
      life_ = etcd_.life();
      watched_ = etcd_.revision();
      arriving_.emplace_back(watch_at_, etcd_.all());
    } else if (*watched_ < etcd_.revision()) {
      EtcdChanges changes = etcd_.since(*watched_);
      watched_ = etcd_.revision();
      arriving_.emplace_back(watch_at_, std::move(changes));
    }
  }

  ModelEtcd& etcd_;
  std::mt19937_64 random_;
  bool is_up_ = true;
  bool is_lost_ = false;
  std::optional<std::int64_t> watched_;
  std::uint64_t life_ = 0;
  TimeNs watch_at_ = 0;
  std::vector<std::pair<TimeNs, std::pair<std::uint64_t, EtcdRequest>>> asked_;
  std::vector<std::pair<TimeNs, EtcdEvent>> arriving_;
};

}  // namespace kvferry::controller::scale
