#include "controller/directory/sessions.h"

#include <bit>

#include "controller/protocol/wire.h"
#include "transport/base/log.h"
#include "transport/base/printable.h"

namespace kvferry::controller {
namespace {

constexpr std::size_t kRefusalBytesMax = 2048;

}  // namespace

Sessions::Sessions(const DirectoryOptions& options, TimeNs now, VersionRange protocol)
    : protocol_(protocol.newest == 0 ? wire::kProtocol : protocol),
      newest_incarnation_(options.newest_incarnation),
      wall_ms_(options.wall_ms),
      directory_(options),
      orders_(directory_),
      started_at_(now) {}

void Sessions::adopt_nodes() {
  for (const auto& [node, info] : directory_.nodes())
    peers_[node] = Peer{{}, nullptr, fmt::format("'{}' of namespace '{}'", info->engine_id, info->name_space)};
}

void Sessions::disconnected(ConnectionId connection) {
  const auto session = sessions_.find(connection);
  if (session == sessions_.end()) return;
  peers_.at(session->second.node).connection.reset();
  sessions_.erase(session);
}

void Sessions::expire(TimeNs now) {
  for (const NodeId node : directory_.expire(now)) {
    ++counters_.nodes_expired;
    log().warn(
        "node {} is removed: its lease expired without a message from it; if the node still runs, it registers again",
        name_of(node));
    end_session(node, now);
  }
  orders_.advance(now);
  send_orders();
}

Status Sessions::status(TimeNs now) const {
  Status status{std::string(kvferry::version()), static_cast<std::uint64_t>((now - started_at_) / kMillisecond),
                counters_, directory_.status(now)};
  if (const Journal* journal = directory_.journal(); journal != nullptr) status.state = journal->status(now);
  if (observer_ != nullptr) status.scale = observer_->status(now);
  status.counters.chunks_dropped = directory_.num_chunks_dropped();
  status.counters.digests_differed = directory_.num_digests_differed();
  orders_.add_to(status);
  status.insecure = insecure_;
  status.lost = directory_.lost(now);
  status.refusal = refusal_;
  if (!refusal_.empty()) status.refusal_age_ms = static_cast<std::uint64_t>((now - refused_at_) / kMillisecond);
  if (wall_ms_ != nullptr) status.wall_ms = wall_ms_();
  return status;
}

const Sessions::Session* Sessions::session(ConnectionId connection) const {
  const auto it = sessions_.find(connection);
  return it == sessions_.end() ? nullptr : &it->second;
}

void Sessions::count_malformed(std::string_view reason) {
  // A flood of malformed messages must not fill the disk: only the 1st, 2nd, 4th, 8th ... is logged.
  if (std::has_single_bit(++counters_.messages_malformed))
    log().warn("dropped a malformed message ({} so far): {}", counters_.messages_malformed, reason);
}

void Sessions::count_refused(std::string_view why, TimeNs now) {
  ++counters_.nodes_refused;
  // The text quotes what the node sent, and commands print the text on terminals, so it may have printable bytes only.
  refusal_ = printable(why, kRefusalBytesMax);
  refused_at_ = now;
}

void Sessions::count_refused_handshake() {
  if (std::has_single_bit(++counters_.handshakes_refused))
    log().warn(
        "refused a connection ({} so far): the peer has no cluster key, or one that this controller does not accept "
        "(cluster_key_file)",
        counters_.handshakes_refused);
}

void Sessions::count_delayed(ConnectionId connection, std::string_view used) {
  if (!std::has_single_bit(++counters_.peers_delayed)) return;
  const Session* const sender = session(connection);
  log().warn(
      "messages of {} wait for those of other peers, or are dropped or answered with nothing ({} times so far): "
      "it used its share, {}",
      sender == nullptr ? "a peer that is no registered node" : "node " + name_of(sender->node),
      counters_.peers_delayed, used);
}

void Sessions::revoke(ConnectionId from, TimeNs now) {
  ++counters_.messages_forbidden;
  const Session* const found = session(from);
  if (found == nullptr) return;
  const NodeId node = found->node;
  log().warn("node {} is removed: its member key was revoked", name_of(node));
  directory_.leave(node);
  end_session(node, now);
}

void Sessions::execute(const wire::AdminRequest& request, TimeNs now) { orders_.execute(request, std::nullopt, now); }

void Sessions::fence(NodeId node, TimeNs now) {
  if (!directory_.leave(node)) return;
  ++counters_.nodes_fenced;
  log().info("node {} is removed from this replica: a newer incarnation of the node registered with another replica",
             name_of(node));
  end_session(node, now);
}

void Sessions::begin_session(const Turn& turn, NodeId node, const NodeInfo& info) {
  // A connection serves one node: if another node used this connection before, that node has to register again on
  // another connection.
  if (const Session* other = session(turn.from); other != nullptr && other->node != node) disconnected(turn.from);
  if (const auto known = peers_.find(node); known == peers_.end()) {
    ++counters_.nodes_registered;
    log().info("node '{}' of namespace '{}' registered: incarnation {}, role {}, endpoint {}", info.engine_id,
               info.name_space, info.incarnation, info.role, info.endpoint);
  } else if (known->second.connection) {
    sessions_.erase(*known->second.connection);  // the new connection replaces the old one
  }
  peers_[node] = Peer{turn.from, &turn.replies, fmt::format("'{}' of namespace '{}'", info.engine_id, info.name_space),
                      turn.version};
  sessions_[turn.from] = Session{node, info.incarnation};
}

void Sessions::end_session(NodeId node, TimeNs now) {
  if (observer_ != nullptr) observer_->gone(node, now);
  orders_.gone(node);
  const auto it = peers_.find(node);
  if (it == peers_.end()) return;
  if (it->second.connection) sessions_.erase(*it->second.connection);
  peers_.erase(it);
}

void Sessions::send_orders() {
  for (const NodeId node : orders_.take_snapshots_wanted()) {
    directory_.want_snapshot(node);
    const auto peer = peers_.find(node);
    if (peer == peers_.end() || !peer->second.connection)
      continue;  // the node is asked for the snapshot when it reconnects
    request_repair({*peer->second.connection, 0, *peer->second.replies, {}, peer->second.version},
                   sessions_.at(*peer->second.connection));
  }
  for (Orders::Order& order : orders_.take_orders()) {
    const auto peer = peers_.find(order.to);
    bool is_sent = peer != peers_.end() && peer->second.connection;
    if (is_sent) {
      wire::set_version(order.bytes, peer->second.version);
      is_sent = peer->second.replies->send(*peer->second.connection, order.bytes);
    }
    if (is_sent) ++counters_.orders_sent;
    count_reply(is_sent);
  }
}

std::string Sessions::name_of(NodeId node) const {
  const auto it = peers_.find(node);
  return it == peers_.end() ? fmt::format("number {} (without a connection)", node) : it->second.name;
}

}  // namespace kvferry::controller
