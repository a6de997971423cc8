#include "controller/scale/replicated_state.h"

#include <algorithm>
#include <charconv>

#include "controller/scale/shared_record.h"

namespace kvferry::controller::scale {
namespace {

constexpr std::size_t kSweptPerTurn = 64;    // number of nodes that sweep() checks in one call
constexpr std::size_t kLookedPerTurn = 512;  // number of dirty keys that due() checks in one call

std::string escaped(std::string_view text) {
  std::string plain;
  for (const char c : text) {
    if (c == '/' || c == '%') {
      plain += fmt::format("%{:02x}", static_cast<unsigned>(c));
    } else {
      plain += c;
    }
  }
  return plain;
}

std::string unescaped(std::string_view text) {
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    unsigned code = 0;
    if (text[i] == '%' && i + 2 < text.size() &&
        std::from_chars(text.data() + i + 1, text.data() + i + 3, code, 16).ec == std::errc{}) {
      plain += static_cast<char>(code);
      i += 2;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

std::uint64_t left_ms(const SharedRecord& record, TimeNs now) {
  return static_cast<std::uint64_t>(std::max<TimeNs>(0, record.deadline - now) / kMillisecond);
}

}  // namespace

ReplicatedState::ReplicatedState(ReplicatedStateOptions options)
    : options_(std::move(options)), retry_ms_(options_.retry_ms_min) {
  mark_dirty(own_key());
}

std::string ReplicatedState::own_key() const { return options_.prefix + "replicas/" + escaped(options_.name); }

std::string ReplicatedState::own_value() const { return fmt::format("{} {}", options_.run, options_.endpoint); }

std::string ReplicatedState::node_key(const NodeName& node) const {
  return options_.prefix + "nodes/" + escaped(node.name_space) + "/" + escaped(node.engine_id);
}

std::optional<NodeName> ReplicatedState::node_of(const std::string& key) const {
  const std::string begin = options_.prefix + "nodes/";
  if (!key.starts_with(begin)) return std::nullopt;
  const std::size_t slash = key.find('/', begin.size());
  if (slash == std::string::npos) return std::nullopt;
  return NodeName{unescaped(std::string_view(key).substr(begin.size(), slash - begin.size())),
                  unescaped(std::string_view(key).substr(slash + 1))};
}

std::string ReplicatedState::record_key(const std::string& kind, const std::string& id) const {
  return options_.prefix + "records/" + kind + "/" + id;
}

std::optional<Incarnation> ReplicatedState::newest(const NodeName& node) const {
  const auto it = nodes_.find(node);
  return it == nodes_.end() ? std::nullopt : std::optional(Incarnation{it->second.newest});
}

void ReplicatedState::joined(const NodeName& name, Incarnation incarnation, TimeNs now) {
  Node& node = nodes_[name];
  if (incarnation.value < node.newest) return;
  node = {.newest = incarnation.value, .is_here = true, .alive_at = now};
  mark_dirty(node_key(name));
}

void ReplicatedState::left(const NodeName& name, TimeNs now) {
  const auto it = nodes_.find(name);
  if (it == nodes_.end()) return;
  it->second.is_here = false;
  it->second.alive_at = now;
}

Result<void> ReplicatedState::set(SharedRecord record, TimeNs now) {
  const std::string key = record_key(record.kind, record.id);
  const auto known = records_.find(key);
  if (known == records_.end() && records_.size() >= options_.records_max)
    return Error{ErrorCode::kFull,
                 fmt::format("the replicas share {} values through etcd already, which is the limit", records_.size())};
  if (record.kind.empty() || record.kind.find('/') != std::string::npos || record.deadline <= now)
    return Error{ErrorCode::kInvalidArgument, fmt::format("a value that replicas share needs a kind without '/' and "
                                                          "time until its end; its kind is '{}', and {} ms are left",
                                                          record.kind, left_ms(record, now))};
  record.version = known == records_.end() ? 1 : known->second.version + 1;
  if (const auto own = own_.find(key); own != own_.end())
    record.version = std::max(record.version, own->second.record.version + 1);
  own_[key] = OwnRecord{.record = record};
  records_[key] = record;
  news_.emplace_back(RecordSet{std::move(record)});
  mark_dirty(key);
  return {};
}

std::vector<SharedNews> ReplicatedState::take_news() { return std::exchange(news_, {}); }

std::optional<EtcdRequest> ReplicatedState::final_request() const {
  return lease_ == 0 ? std::nullopt : std::optional<EtcdRequest>(EtcdRevoke{lease_});
}

std::vector<Replica> ReplicatedState::replicas() const {
  const std::string begin = options_.prefix + "replicas/";
  std::vector<Replica> replicas;
  for (auto it = in_etcd_.lower_bound(begin); it != in_etcd_.end() && it->first.starts_with(begin); ++it) {
    const std::string& value = it->second.value;
    const std::size_t space = value.find(' ');
    const std::string name = unescaped(std::string_view(it->first).substr(begin.size()));
    if (it->second.is_gone || name == options_.name || space == std::string::npos) continue;
    replicas.push_back({name, value.substr(space + 1)});
  }
  replicas.push_back({options_.name, options_.endpoint});
  std::ranges::sort(replicas);
  return replicas;
}

const ReplicatedState::EtcdValue* ReplicatedState::value_in_etcd(const std::string& key) const {
  const auto it = in_etcd_.find(key);
  return it == in_etcd_.end() || it->second.is_gone ? nullptr : &it->second;
}

/// Returns the value that the key should have in etcd; nullopt if this replica need not change it.
std::optional<ReplicatedState::DesiredValue> ReplicatedState::desired(const std::string& key, TimeNs now) const {
  const EtcdValue* there = value_in_etcd(key);
  if (key == own_key()) {
    if (is_name_taken_ || lease_ == 0) return std::nullopt;
    if (there != nullptr && there->lease == lease_ && there->value == own_value()) return std::nullopt;
    return DesiredValue{own_value(), lease_};
  }
  if (const std::optional<NodeName> name = node_of(key)) {
    const auto node = nodes_.find(*name);
    if (node == nodes_.end()) return std::nullopt;
    const bool is_over = !node->second.is_here && now - node->second.alive_at > options_.keep_ms * kMillisecond;
    if (is_over) return there == nullptr ? std::nullopt : std::optional(DesiredValue{});
    if (there != nullptr && number_of(there->value) >= node->second.newest) return std::nullopt;
    return DesiredValue{std::to_string(node->second.newest)};
  }
  const auto own = own_.find(key);
  if (own == own_.end() || own->second.record.deadline <= now) return std::nullopt;
  const SharedRecord& record = own->second.record;
  const std::uint64_t version_there = there == nullptr ? 0 : record_fields_of(there->value).version;
  if (there != nullptr && version_there >= record.version) return std::nullopt;
  return DesiredValue{encode(RecordFields{record.owner, record.value, record.version, left_ms(record, now)}),
                      own->second.lease};
}

/// Returns the next request that is needed to give the key its desired value; nullopt if none is needed.
std::optional<EtcdRequest> ReplicatedState::next_request(const std::string& key, TimeNs now) {
  std::optional<DesiredValue> wanted = desired(key, now);
  if (!wanted) return std::nullopt;
  const auto it = in_etcd_.find(key);
  const std::int64_t mod_revision = it == in_etcd_.end() || it->second.is_gone ? 0 : it->second.mod_revision;
  if (!wanted->value) return EtcdErase{key, mod_revision};
  if (const auto own = own_.find(key); own != own_.end() && wanted->lease == 0) {
    const auto ttl_s = static_cast<std::int64_t>(left_ms(own->second.record, now) / 1000 + 1);
    return EtcdGrant{ttl_s};
  }
  return EtcdPut{{key, std::move(*wanted->value), mod_revision, wanted->lease}};
}

std::vector<ReplicatedState::Request> ReplicatedState::due(TimeNs now) {
  std::vector<Request> requests;
  keep_lease(requests, now);
  sweep(now);
  if (!is_synced_ || now < retry_at_) return requests;
  auto it = dirty_.upper_bound(looked_last_);
  for (std::size_t n = std::min(dirty_.size(), kLookedPerTurn); n > 0 && in_flight_.size() < options_.in_flight_max;
       --n) {
    if (it == dirty_.end()) it = dirty_.begin();
    if (it == dirty_.end()) break;
    looked_last_ = it->first;
    if (it->second) {
      ++it;
    } else if (std::optional<EtcdRequest> request = next_request(it->first, now)) {
      it->second = true;
      send(requests, it->first, std::move(*request));
      ++it;
    } else {
      it = dirty_.erase(it);
    }
  }
  return requests;
}

void ReplicatedState::keep_lease(std::vector<Request>& requests, TimeNs now) {
  if (is_lease_requested_ || now < lease_at_) return;
  is_lease_requested_ = true;
  if (lease_ == 0) {
    send(requests, "", EtcdGrant{options_.lease_s});
  } else {
    send(requests, "", EtcdKeepAlive{lease_});
  }
}

void ReplicatedState::send(std::vector<Request>& requests, const std::string& key, EtcdRequest request) {
  const std::uint64_t token = ++last_token_;
  in_flight_.emplace(token, std::pair(key, request));
  requests.push_back({token, std::move(request)});
}

/// Drops nodes that have been gone for keep_ms and whose keys in etcd are erased, a few in each call. If there are too
/// many nodes, drops gone nodes at once. Also drops expired records.
void ReplicatedState::sweep(TimeNs now) {
  auto it = nodes_.upper_bound(swept_last_);
  for (std::size_t n = std::min(nodes_.size(), kSweptPerTurn); n > 0; --n) {
    if (it == nodes_.end()) it = nodes_.begin();
    swept_last_ = it->first;
    const bool is_too_many = nodes_.size() > options_.nodes_max;
    const bool is_over = now - it->second.alive_at > options_.keep_ms * kMillisecond;
    const std::string key = node_key(it->first);
    if (it->second.is_here || (!is_over && !is_too_many)) {
      ++it;
    } else if (is_too_many || (is_synced_ && value_in_etcd(key) == nullptr)) {
      it = nodes_.erase(it);
      if (nodes_.empty()) break;
    } else {
      mark_dirty(key);
      ++it;
    }
  }
  if (now < swept_at_ + 100 * kMillisecond) return;
  swept_at_ = now;
  std::erase_if(own_, [&](const auto& entry) { return entry.second.record.deadline <= now; });
  std::erase_if(records_, [&](const auto& entry) { return entry.second.deadline <= now; });
}

}  // namespace kvferry::controller::scale
