#include "controller/directory/directory.h"

#include <algorithm>

#include "transport/base/fingerprint.h"

namespace kvferry::controller {
namespace {

// Number of cache lines that Directory::tidy() passes to ChunkTable::tidy(), which then takes up to 200 us.
constexpr std::size_t kTidyStepsPerTurn = 1024;

Result<void> check_text(std::string_view field, std::string_view text, std::size_t size_max, bool may_be_empty) {
  const auto printable = [](char c) { return static_cast<unsigned char>(c) >= 0x20 && c != 0x7f; };
  if (text.size() > size_max || (text.empty() && !may_be_empty)) {
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("the field {} of a node's registration has {} bytes; {} to {} are allowed", field,
                             text.size(), may_be_empty ? 0 : 1, size_max)};
  }
  if (!std::all_of(text.begin(), text.end(), printable)) {
    return Error{
        ErrorCode::kInvalidArgument,
        fmt::format("the field {} of a node's registration contains control characters; only printable text is allowed",
                    field)};
  }
  return {};
}

Result<void> check_info(const NodeInfo& info) {
  struct {
    std::string_view field, text;
    std::size_t size_max;
    bool may_be_empty;
  } const fields[] = {{"engine_id", info.engine_id.value, 256, false},
                      {"role", info.role, 64, true},
                      {"endpoint", info.endpoint, 512, false},
                      {"namespace", info.name_space, 256, true},
                      {"fingerprint", info.fingerprint, 4096, false},
                      {"serves", info.serves, 512, true},
                      {"version", info.version, 64, true},
                      {"secret", info.secret, 64, true}};
  for (const auto& [field, text, size_max, may_be_empty] : fields) {
    KVFERRY_TRY(check_text(field, text, size_max, may_be_empty));
  }
  for (const NodeDetail& detail : kNodeDetails) {
    KVFERRY_TRY(check_text(detail.name, info.details.*detail.text, detail.bytes_max, /*may_be_empty=*/true));
  }
  return {};
}

}  // namespace

Result<Joined> Directory::join(const NodeInfo& info, std::uint64_t next_sequence, TimeNs now) {
  KVFERRY_TRY(check_info(info));
  const auto home_it = namespaces_.find(info.name_space);
  Namespace* home = home_it == namespaces_.end() ? nullptr : home_it->second.get();
  Joined joined;
  Node* old = nullptr;
  if (home != nullptr) {
    const auto known = home->nodes.find(info.engine_id.value);
    if (known != home->nodes.end()) {
      joined.id = known->second;
      old = find(known->second);
    }
    // A namespace may change its fingerprint if the node that registers replaces the namespace's only node.
    const bool others_alive = home->nodes.size() > (old != nullptr ? 1U : 0U);
    const bool same_incarnation = old != nullptr && old->info.incarnation == info.incarnation;
    if (old != nullptr && old->info.incarnation > info.incarnation) {
      return Error{ErrorCode::kRefused,
                   fmt::format("node '{}' is registered with the newer incarnation {}, so incarnation {} is refused as "
                               "out of date; if both processes are to run, give each an engine id of its own",
                               info.engine_id, old->info.incarnation, info.incarnation)};
    }
    if (home->fingerprint != info.fingerprint && (others_alive || same_incarnation)) {
      return Error{
          ErrorCode::kRefused,
          fmt::format("node '{}' cannot join namespace '{}': {} (\"here\" is the namespace, \"there\" is the node); "
                      "use the same model and KV settings, or another namespace",
                      info.engine_id, info.name_space, fingerprint_difference(home->fingerprint, info.fingerprint))};
    }
    if (same_incarnation && !old->info.secret.empty() && old->info.secret != info.secret) {
      return Error{
          ErrorCode::kRefused,
          fmt::format(
              "node '{}' is registered with incarnation {} by another process; start this process again, so "
              "that it gets an incarnation of its own, and if both are to run, give each an engine id of its own",
              info.engine_id, info.incarnation)};
    }
    if (same_incarnation) {
      // A repeated Hello can't set the secret: otherwise another process could set the secret of a node whose older
      // release sends no secret.
      std::string secret = std::move(old->info.secret);
      old->info = info;
      old->info.secret = std::move(secret);
      old->heard_at = now;
      if (next_sequence < old->next_sequence) {  // the node began its sequence numbers anew
        drop_snapshot(*old);
        old->owes_snapshot = true;
        old->next_sequence = old->heard_below = next_sequence;
      }
      old->heard_below = std::max(old->heard_below, next_sequence);
      old->asked_at = now;
      joined.snapshot_wanted = old->needs_snapshot();
      joined.resend_wanted = !joined.snapshot_wanted && old->has_gap();
      if (journal_ != nullptr) journal_->joined(joined.id, old->info, next_sequence);
      return joined;
    }
  }
  if (old == nullptr && nodes_.size() >= options_.nodes_max) {
    return Error{ErrorCode::kFull,
                 fmt::format("node '{}' cannot register: {} nodes are registered already, which is the limit of this "
                             "controller; stop other nodes first",
                             info.engine_id, nodes_.size())};
  }
  if (old != nullptr) {
    joined.fenced = joined.id;
    remove(joined.id);
  }
  std::unique_ptr<Namespace>& slot = namespaces_[info.name_space];
  if (slot == nullptr) {
    slot.reset(new Namespace{info.fingerprint, ChunkTable(options_.tails_per_group_max, options_.index), {}, {}, 0});
  }
  slot->fingerprint = info.fingerprint;  // the fingerprint changes only if the namespace has no other node
  joined.id = NodeId{++last_node_id_};
  joined.snapshot_wanted = true;
  auto node = std::make_unique<Node>(Node{.info = info,
                                          .home = slot.get(),
                                          .seen = {.index = slot->table.add_holder()},
                                          .heard_at = now,
                                          .next_sequence = next_sequence,
                                          .heard_below = next_sequence,
                                          .asked_at = now});
  std::erase_if(lost_, [&](const Lost& one) {
    return one.status.engine_id == info.engine_id && one.status.name_space == info.name_space;
  });
  slot->nodes[info.engine_id.value] = joined.id;
  slot->by_index[node->seen.index] = node.get();
  nodes_[joined.id] = std::move(node);
  if (journal_ != nullptr) journal_->joined(joined.id, info, next_sequence);
  return joined;
}

bool Directory::leave(NodeId id) {
  if (find(id) == nullptr) return false;
  remove(id);
  return true;
}

Result<std::vector<Holder>> Directory::lookup(NodeId asker, const LookupQuery& query, TimeNs now) {
  if (!find_holders(asker, query, now, found_))
    return Error{ErrorCode::kNotFound, "the node that sent the lookup is not registered; it must register first"};
  std::vector<Holder> holders;
  holders.reserve(found_.size());
  for (const HolderView& found : found_) {
    holders.push_back({found.info->engine_id,
                       found.info->incarnation,
                       found.info->endpoint,
                       found.num_full_chunks,
                       {found.tails.begin(), found.tails.end()},
                       found.tier,
                       found.confirmed,
                       found.info->details.member});
  }
  return holders;
}

bool Directory::find_holders(NodeId asker, const LookupView& query, TimeNs now, std::vector<HolderView>& found) {
  found.clear();
  Node* node = find(asker);
  if (node == nullptr) return false;
  node->heard_at = now;
  find_holders(*node->home, query, node->seen.index, found);
  return true;
}

void Directory::find_holders(const std::string& name_space, const LookupView& query, std::vector<HolderView>& found) {
  found.clear();
  const auto home = namespaces_.find(name_space);
  if (home != namespaces_.end()) find_holders(*home->second, query, std::nullopt, found);
}

void Directory::find_holders(Namespace& home, const LookupView& query, std::optional<ChunkTable::HolderIndex> asker,
                             std::vector<HolderView>& found) {
  home.table.lookup(query, asker, matches_);
  for (const ChunkTable::Match& match : matches_) {
    const Node& holder = *home.by_index.at(match.holder);
    found.push_back({&holder.info, match.num_full_chunks, match.tails, match.tier, holder.is_confirmed(),
                     holder.heard_at, holder.is_leaving});
  }
  const auto better = [](const HolderView& a, const HolderView& b) {
    if (a.is_leaving != b.is_leaving) return b.is_leaving;
    if (a.num_full_chunks != b.num_full_chunks) return a.num_full_chunks > b.num_full_chunks;
    if (a.heard_at != b.heard_at) return a.heard_at > b.heard_at;
    // The last criterion gives equally good nodes the same order each time.
    return a.info->engine_id < b.info->engine_id;
  };
  const std::size_t num_kept = std::min(found.size(), options_.holders_per_reply_max);
  std::partial_sort(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(num_kept), found.end(), better);
  found.resize(num_kept);
}

std::vector<NodeId> Directory::expire(TimeNs now) {
  const TimeNs lease = options_.lease_ms * kMillisecond;
  const bool was_late = expire_called_at_ && now - *expire_called_at_ > lease / 2;
  expire_called_at_ = now;
  std::vector<NodeId> expired;
  for (auto& [id, node] : nodes_) {
    if (was_late) node->heard_at = std::max(node->heard_at, now - lease + options_.grace_ms * kMillisecond);
    if (node->next && now - node->snapshot_begun_at > options_.snapshot_ms * kMillisecond) {
      drop_snapshot(*node);
      if (journal_ != nullptr) journal_->snapshot_dropped(id);
    }
    if (now - node->heard_at > lease) expired.push_back(id);
  }
  for (const NodeId id : expired) {
    lose(*nodes_.at(id), now);
    remove(id);
  }
  tidy();
  return expired;
}

std::vector<std::pair<NodeId, const NodeInfo*>> Directory::nodes() const {
  std::vector<std::pair<NodeId, const NodeInfo*>> nodes;
  for (const auto& [id, node] : nodes_) nodes.emplace_back(id, &node->info);
  return nodes;
}

std::uint64_t Directory::kept_below(NodeId id) const {
  const Node* known = node(id);
  if (known == nullptr) return 0;
  return journal_ == nullptr ? known->next_sequence : journal_->kept_below(id, known->next_sequence);
}

Directory::Node* Directory::find(NodeId id) { return const_cast<Node*>(node(id)); }

void Directory::remove(NodeId id) {
  Node& node = *nodes_.at(id);
  Namespace& home = *node.home;
  drop_snapshot(node);
  num_chunks_ -= node.num_counted;
  home.num_chunks -= node.num_counted;
  home.table.remove_holder(node.seen.index);
  ++index_version_;
  home.by_index.erase(node.seen.index);
  home.nodes.erase(node.info.engine_id.value);
  nodes_.erase(id);
  if (journal_ != nullptr) journal_->gone(id);
}

/// Goes through the namespaces in the order of their names, from the one after the last visited one, and stops at the
/// first whose table still has work left. A namespace without nodes is erased only when its table has no work left,
/// because freeing a full table at once would take too long.
void Directory::tidy() {
  for (std::size_t i = namespaces_.size(); i > 0; --i) {
    auto it = namespaces_.upper_bound(tidied_last_);
    if (it == namespaces_.end()) it = namespaces_.begin();
    tidied_last_ = it->first;
    if (it->second->table.tidy(kTidyStepsPerTurn)) return;
    if (it->second->nodes.empty()) namespaces_.erase(it);
  }
}

}  // namespace kvferry::controller
