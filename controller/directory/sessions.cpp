#include "controller/directory/sessions.h"

#include <algorithm>
#include <bit>

#include "controller/protocol/publish_parts.h"
#include "controller/directory/session_observer.h"
#include "controller/protocol/wire.h"
#include "controller/protocol/wire_lookup.h"
#include "transport/base/log.h"

namespace kvferry::controller {

namespace {

/// What the node speaks, and of which both speak one; an older node tells the one in the header.
VersionRange spoken_by(const wire::Hello& hello) {
  if (hello.newest_protocol == 0) return {hello.header.version, hello.header.version};
  return {hello.oldest_protocol, hello.newest_protocol};
}

}  // namespace

Sessions::Sessions(const DirectoryOptions& options, TimeNs now, VersionRange protocol)
    : protocol_(protocol.newest == 0 ? wire::kProtocol : protocol),
      directory_(options),
      orders_(directory_),
      started_at_(now) {}

void Sessions::take(ConnectionId from, std::string_view bytes, TimeNs now, ReplySender& replies) {
  Turn turn{from, now, replies, bytes, protocol_.newest};
  ++counters_.messages_taken;
  if (const auto lookup = wire::read_lookup(bytes, protocol_)) {
    turn.version = lookup->version;
    return on(turn, *lookup);
  }
  Result<wire::Message> message = wire::parse(bytes, protocol_);
  if (message) {
    std::visit(
        [&](auto& body) {
          turn.version = body.header.version;
          on(turn, body);
        },
        *message);
  } else if (message.error().code == ErrorCode::kRefused) {
    ++counters_.nodes_refused;
    reply(turn, wire::Refused{.reason = message.error().what});
  } else {
    count_malformed(message.error().what);
  }
  send_orders();
}

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
    log().warn("node {} was silent for too long and is forgotten", name_of(node));
    end_session(node, now);
  }
  orders_.advance(now);
  send_orders();
}

Status Sessions::status(TimeNs now) const {
  Status status{KVFERRY_VERSION, static_cast<std::uint64_t>((now - started_at_) / kMillisecond), counters_,
                directory_.status(now)};
  if (const Journal* journal = directory_.journal(); journal != nullptr) status.state = journal->status(now);
  if (observer_ != nullptr) status.scale = observer_->status(now);
  status.counters.chunks_dropped = directory_.num_chunks_dropped();
  status.counters.digests_differed = directory_.num_digests_differed();
  orders_.add_to(status);
  return status;
}

const Sessions::Session* Sessions::session(ConnectionId connection) const {
  const auto it = sessions_.find(connection);
  return it == sessions_.end() ? nullptr : &it->second;
}

void Sessions::count_malformed(std::string_view story) {
  // A flood must not fill the disk: the 1st, 2nd, 4th, 8th ... is told.
  if (std::has_single_bit(++counters_.messages_malformed))
    log().warn("dropped a message ({} so far): {}", counters_.messages_malformed, story);
}

std::optional<std::string> Sessions::refusal(const wire::Hello& hello, const NodeInfo& info) const {
  const std::string name = fmt::format("node '{}'", info.engine_id);
  const Result<std::uint32_t> common = common_version(
      "controller protocol", {"this controller", KVFERRY_VERSION, protocol_}, {name, hello.version, spoken_by(hello)});
  if (!common) return common.error().what;
  return observer_ == nullptr ? std::nullopt : observer_->refusal(info);
}

void Sessions::on(const Turn& hello_turn, const wire::Hello& hello) {
  Turn turn = hello_turn;
  turn.version = std::min(protocol_.newest, spoken_by(hello).newest);
  const NodeInfo info{EngineId{hello.engine_id},
                      Incarnation{hello.incarnation},
                      hello.role,
                      hello.endpoint,
                      hello.name_space,
                      hello.fingerprint,
                      hello.serves,
                      hello.version};
  const std::optional<std::string> why_not = refusal(hello, info);
  const Result<Joined> joined = why_not ? Result<Joined>(Error{ErrorCode::kRefused, *why_not})
                                        : directory_.join(info, hello.next_sequence, turn.now);
  if (!joined) {
    ++counters_.nodes_refused;
    log().warn("refused a node: {}", joined.error().what);
    return reply(turn, wire::Refused{.reason = joined.error().what});
  }
  if (joined->fenced) {
    ++counters_.nodes_fenced;
    log().info("node {} is replaced by incarnation {}", name_of(*joined->fenced), info.incarnation);
    end_session(*joined->fenced, turn.now);
  }
  begin_session(turn, joined->id, info);
  wire::Registered registered{.incarnation = hello.incarnation, .snapshot_wanted = joined->snapshot_wanted};
  if (observer_ != nullptr) {
    observer_->joined(joined->id, info, hello.next_sequence, turn.now);
    registered.replicas = observer_->replicas();
    sessions_.at(turn.from).told_replicas = observer_->replicas_version();
  }
  reply(turn, registered);
  if (joined->resend_wanted) want_repair(turn, sessions_.at(turn.from));
}

void Sessions::on(const Turn& turn, const wire::Heartbeat& heartbeat) {
  ++counters_.heartbeats;
  const Session* session = session_of(turn, heartbeat.incarnation);
  if (session == nullptr) return send_unregistered(turn, heartbeat.incarnation);
  const std::uint64_t num_differed = directory_.num_digests_differed();
  if (directory_.heartbeat(session->node, heartbeat.next_sequence, turn.now, heartbeat.digests) ==
      Update::kRepairWanted)
    want_repair(turn, *session);
  if (directory_.num_digests_differed() != num_differed)
    log().warn("node {} holds something else than is known of it; it is asked for everything", name_of(session->node));
  directory_.set_load(session->node, heartbeat.load, turn.now);
  wire::HeartbeatAck answer{.incarnation = heartbeat.incarnation, .kept_below = directory_.kept_below(session->node)};
  if (observer_ != nullptr && session->told_replicas != observer_->replicas_version()) {
    answer.replicas = observer_->replicas();
    sessions_.at(turn.from).told_replicas = observer_->replicas_version();
  }
  reply(turn, answer);
}

void Sessions::on(const Turn& turn, const wire::Publish& publish) {
  const Session* session = session_of(turn, publish.incarnation);
  if (session == nullptr) return;  // its next heartbeat is told
  Result<std::vector<ChunkEntry>> chunks = chunks_of(publish);
  if (!chunks) {
    count_malformed(chunks.error().what);
    // Its number counts all the same: sent again it would be no better, and hold up all that follows.
    chunks = std::vector<ChunkEntry>{};
  }
  counters_.chunks_published += chunks->size();
  const Tier tier = wire::tier_of(publish.tier).value_or(Tier::kHost);
  const Update update = directory_.publish(session->node, publish.sequence, mark_of(publish), *chunks, turn.now, tier);
  if (observer_ != nullptr) observer_->told(session->node, publish.sequence, turn.bytes, turn.now);
  if (update == Update::kRepairWanted) want_repair(turn, *session);
  orders_.published(session->node, *chunks, mark_of(publish), turn.now);
}

void Sessions::on(const Turn& turn, const wire::Evict& evict) {
  const Session* session = session_of(turn, evict.incarnation);
  if (session == nullptr) return;
  counters_.chunks_evicted += evict.keys.keys.size();
  const Update update = directory_.evict(session->node, evict.sequence, evict.keys.keys, turn.now);
  if (observer_ != nullptr) observer_->told(session->node, evict.sequence, turn.bytes, turn.now);
  if (update == Update::kRepairWanted) want_repair(turn, *session);
}

void Sessions::on(const Turn& turn, const wire::Lookup& lookup) {
  wire::LookupFields fields{.incarnation = lookup.incarnation, .token = lookup.token, .query = {}};
  fields.query.keys = lookup.keys.keys;
  fields.query.tail_groups = lookup.tail_groups.keys;
  fields.query.exact_tails = lookup.exact_tails.keys;
  on(turn, fields);
}

void Sessions::on(const Turn& turn, const wire::LookupFields& lookup) {
  const Session* session = session_of(turn, lookup.incarnation);
  if (session == nullptr) return send_unregistered(turn, lookup.incarnation);
  if (lookup.query.num_keys() > wire::kKeysPerLookupMax) return count_malformed("a look-up of too many keys");
  if (!directory_.find_holders(session->node, lookup.query, turn.now, found_))
    return send_unregistered(turn, lookup.incarnation);
  ++counters_.lookups;
  counters_.lookup_keys += lookup.query.keys.size();
  if (!found_.empty()) ++counters_.lookup_hits;
  wire::write_reply(answer_, turn.version, lookup.token, found_, directory_.index_version());
  count_reply(turn.replies.send(turn.from, {answer_.data(), answer_.size()}));
}

void Sessions::on(const Turn& turn, const wire::Leave& leave) {
  const Session* session = session_of(turn, leave.incarnation);
  if (session == nullptr) return;
  const NodeId node = session->node;
  log().info("node {} left", name_of(node));
  directory_.leave(node);
  end_session(node, turn.now);
}

void Sessions::on(const Turn& turn, const wire::AdminRequest& request) {
  const Session* asker = session(turn.from);
  const wire::AdminReply answer =
      orders_.take(request, asker == nullptr ? std::nullopt : std::optional(asker->node), turn.now);
  if (observer_ != nullptr && answer.is_done) observer_->ruled(request, turn.now);
  reply(turn, answer);
}

void Sessions::obey(const wire::AdminRequest& request, TimeNs now) { orders_.take(request, std::nullopt, now); }

void Sessions::on(const Turn& turn, const wire::StatusRequest&) {
  reply(turn, wire::StatusReply{.status = status(turn.now)});
}

void Sessions::fence(NodeId node, TimeNs now) {
  if (!directory_.leave(node)) return;
  ++counters_.nodes_fenced;
  log().info("node {} is fenced: another replica has seen a newer incarnation", name_of(node));
  end_session(node, now);
}

/// nullptr: the sender has to say Hello first. Valid until sessions change.
const Sessions::Session* Sessions::session_of(const Turn& turn, std::uint64_t incarnation) {
  const Session* found = session(turn.from);
  if (found != nullptr && found->incarnation.value == incarnation) return found;
  ++counters_.messages_unregistered;
  return nullptr;
}

void Sessions::begin_session(const Turn& turn, NodeId node, const NodeInfo& info) {
  // One connection, one node: whoever spoke here before has to say Hello on a connection of its own.
  if (const Session* other = session(turn.from); other != nullptr && other->node != node) disconnected(turn.from);
  if (const auto known = peers_.find(node); known == peers_.end()) {
    ++counters_.nodes_registered;
    log().info("node '{}' of namespace '{}' registered: incarnation {}, role {}, at {}", info.engine_id,
               info.name_space, info.incarnation, info.role, info.endpoint);
  } else if (known->second.connection) {
    sessions_.erase(*known->second.connection);  // it comes back on a new connection
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

void Sessions::send_unregistered(const Turn& turn, std::uint64_t incarnation) {
  reply(turn, wire::Unregistered{.incarnation = incarnation});
}

void Sessions::want_repair(const Turn& turn, const Session& session) {
  const Repair repair = directory_.repair(session.node);
  ++(repair.resend_will_do ? counters_.resends_wanted : counters_.snapshots_wanted);
  reply(turn, wire::SnapshotWanted{.incarnation = session.incarnation.value,
                                   .next_sequence = repair.heard_below,
                                   .resend_will_do = repair.resend_will_do,
                                   .resend_from = repair.resend_from});
}

void Sessions::send_orders() {
  for (const NodeId node : orders_.take_snapshots_wanted()) {
    directory_.want_snapshot(node);
    const auto peer = peers_.find(node);
    if (peer == peers_.end() || !peer->second.connection) continue;  // it is asked when it comes back
    want_repair({*peer->second.connection, 0, *peer->second.replies, {}, peer->second.version},
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

std::string_view Sessions::name_of(NodeId node) const {
  const auto it = peers_.find(node);
  return it == peers_.end() ? "of no connection" : std::string_view(it->second.name);
}

template <class T>
void Sessions::reply(const Turn& turn, const T& message) {
  T in_version = message;
  in_version.header.version = turn.version;
  count_reply(turn.replies.send(turn.from, encode(in_version)));
}

}  // namespace kvferry::controller
