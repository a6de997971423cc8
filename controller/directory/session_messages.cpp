// The controller's reaction to each message that a node or a command sends.
#include <algorithm>
#include <bit>

#include "controller/directory/sessions.h"
#include "controller/protocol/wire.h"
#include "transport/base/log.h"
#include "transport/base/printable.h"

namespace kvferry::controller {
namespace {

// Limit on a message, other than a lookup, of a sender that has used its share. Heartbeats are shorter.
constexpr std::size_t kOverShareBytesMax = std::size_t{16} << 10;

/// Returns the protocol versions that the node speaks. An older node sends no range and speaks only the version in the
/// header.
VersionRange spoken_by(const wire::Hello& hello) {
  if (hello.newest_protocol == 0) return {hello.header.version, hello.header.version};
  return {hello.oldest_protocol, hello.newest_protocol};
}

}  // namespace

struct Sessions::Receiver {
  Sessions& self;
  Turn turn;

  void operator()(const wire::Hello& hello) {
    turn.version = std::min(self.protocol_.newest, spoken_by(hello).newest);
    NodeInfo info = hello.node;
    info.details.member = turn.sender.name;
    const std::optional<std::string> why_not = refusal(hello);
    const Result<Joined> joined = why_not ? Result<Joined>(Error{ErrorCode::kRefused, *why_not})
                                          : self.directory_.join(info, hello.next_sequence, turn.now);
    if (!joined) {
      self.count_refused(joined.error().what, turn.now);
      log().warn("refused a node at {}: {}", printable(info.endpoint, 512), joined.error().what);
      return self.reply(turn, wire::Refused{.reason = joined.error().what, .newest_incarnation = newest_of(info)});
    }
    if (joined->fenced) {
      ++self.counters_.nodes_fenced;
      log().info("node {} was started again and is replaced by its newer incarnation {}", self.name_of(*joined->fenced),
                 info.incarnation);
      self.end_session(*joined->fenced, turn.now);
    }
    self.begin_session(turn, joined->id, info);
    wire::Registered registered{.incarnation = info.incarnation.value, .snapshot_wanted = joined->snapshot_wanted};
    if (self.observer_ != nullptr) {
      self.observer_->joined(joined->id, self.directory_.node(joined->id)->info, hello.next_sequence, turn.now);
      registered.replicas = new_replicas();
    }
    self.reply(turn, registered);
    if (joined->resend_wanted) self.request_repair(turn, self.sessions_.at(turn.from));
    self.orders_.joined(joined->id, turn.now);
  }

  void operator()(const wire::Heartbeat& heartbeat) {
    ++self.counters_.heartbeats;
    const Session* session = session_of(heartbeat.incarnation);
    if (session == nullptr) return send_unregistered(heartbeat.incarnation);
    const std::uint64_t num_differed = self.directory_.num_digests_differed();
    request_repair_if(self.directory_.heartbeat(session->node, heartbeat.next_sequence, turn.now, heartbeat.digests),
                      *session);
    if (self.directory_.num_digests_differed() != num_differed) {
      log().warn(
          "node {}: its chunks differ from the controller's index; the node is asked to list all its chunks again",
          self.name_of(session->node));
    }
    self.directory_.set_load(session->node, heartbeat.load, turn.now);
    if (self.wall_ms_ != nullptr && heartbeat.wall_ms > 0)
      self.directory_.set_clock_ahead(session->node, heartbeat.wall_ms - self.wall_ms_());
    if (!heartbeat.report.empty()) {
      if (Result<NodeReport> report = parse_report(heartbeat.report))
        self.directory_.set_report(session->node, std::move(*report), turn.now);
      else if (std::has_single_bit(++self.counters_.reports_malformed))
        log().warn(
            "dropped a report of node {} for the status page ({} dropped so far; the node is served as before): {}",
            self.name_of(session->node), self.counters_.reports_malformed, report.error().what);
    }
    self.reply(turn, wire::HeartbeatAck{.incarnation = heartbeat.incarnation,
                                        .kept_below = self.directory_.kept_below(session->node),
                                        .replicas = new_replicas()});
  }

  void operator()(const wire::Publish& publish) {
    const Session* session = session_of(publish.incarnation);
    if (session == nullptr) return;  // the answer to the node's next heartbeat tells it to register again
    Result<std::vector<ChunkEntry>> chunks = wire::chunks_of(publish);
    if (!chunks) {
      self.count_malformed(fmt::format("node {}: {}", self.name_of(session->node), chunks.error().what));
      // The message still counts as received, with no chunks: if the controller requested it again, it would be
      // malformed again.
      chunks = std::vector<ChunkEntry>{};
    }
    self.counters_.chunks_published += chunks->size();
    const Tier tier = wire::tier_of(publish.tier).value_or(Tier::kHost);
    const SnapshotMark mark = wire::mark_of(publish);
    const Update update = self.directory_.publish(session->node, publish.sequence, mark, *chunks, turn.now, tier);
    if (self.observer_ != nullptr) self.observer_->received(session->node, publish.sequence, turn.bytes, turn.now);
    request_repair_if(update, *session);
    self.orders_.published(session->node, *chunks, mark, turn.now);
  }

  void operator()(const wire::Evict& evict) {
    const Session* session = session_of(evict.incarnation);
    if (session == nullptr) return;
    self.counters_.chunks_evicted += evict.keys.keys.size();
    const Update update = self.directory_.evict(session->node, evict.sequence, evict.keys.keys, turn.now);
    if (self.observer_ != nullptr) self.observer_->received(session->node, evict.sequence, turn.bytes, turn.now);
    request_repair_if(update, *session);
  }

  void operator()(const wire::Lookup& lookup) {
    wire::LookupFields fields{.incarnation = lookup.incarnation, .token = lookup.token, .query = {}};
    fields.query.keys = lookup.keys.keys;
    fields.query.tail_groups = lookup.tail_groups.keys;
    fields.query.exact_tails = lookup.exact_tails.keys;
    (*this)(fields);
  }
  void operator()(const wire::LookupFields& lookup) {
    const Session* session = session_of(lookup.incarnation);
    if (session == nullptr) return send_unregistered(lookup.incarnation);
    if (lookup.query.num_keys() > wire::kKeysPerLookupMax)
      return self.count_malformed(fmt::format("a lookup of node {} has {} keys; at most {} are allowed",
                                              self.name_of(session->node), lookup.query.num_keys(),
                                              wire::kKeysPerLookupMax));
    if (turn.is_over_share)
      self.found_.clear();
    else if (!self.directory_.find_holders(session->node, lookup.query, turn.now, self.found_))
      return send_unregistered(lookup.incarnation);
    ++self.counters_.lookups;
    self.counters_.lookup_keys += lookup.query.keys.size();
    if (!self.found_.empty()) ++self.counters_.lookup_hits;
    wire::write_reply(self.reply_buffer_, turn.version, lookup.token, self.found_, self.directory_.index_version());
    self.count_reply(turn.replies.send(turn.from, {self.reply_buffer_.data(), self.reply_buffer_.size()}));
  }

  void operator()(const wire::Leave& leave) {
    const Session* session = session_of(leave.incarnation);
    if (session == nullptr) return;
    const NodeId node = session->node;
    log().info("node {} has ended its registration and is removed with its chunks", self.name_of(node));
    self.directory_.leave(node);
    self.end_session(node, turn.now);
  }

  void operator()(const wire::AdminRequest& request) {
    if (turn.is_over_share)
      return self.reply(turn, wire::AdminReply{.token = request.token,
                                               .text = "the controller is busy with other messages of this member; try "
                                                       "again"});
    const Session* asker = self.session(turn.from);
    const wire::AdminReply answer =
        self.orders_.execute(request, asker == nullptr ? std::nullopt : std::optional(asker->node), turn.now);
    if (self.observer_ != nullptr && answer.is_done) self.observer_->executed(request, turn.now);
    self.reply(turn, answer);
  }

  void operator()(const wire::StatusRequest&) {
    if (!turn.is_over_share) self.reply(turn, wire::StatusReply{.status = self.status(turn.now)});
  }

  /// Returns true if the sender may send the message. Otherwise replies to the sender with the reason.
  bool is_allowed(const wire::FromNode& message) {
    const auto* const request = std::get_if<wire::AdminRequest>(&message);
    const net::Role least = request != nullptr ? wire::least_role_for(request->verb)
                                               : std::visit([](const auto& body) { return body.kLeastRole; }, message);
    if (turn.sender.role >= least || (request != nullptr && drains_own_node(*request))) return true;
    const std::string what =
        request == nullptr ? "a node" : fmt::format("the command '{}'", request->verb.substr(0, 64));
    const std::string why = fmt::format("{} needs a key of the role {}, but the sender has the key of {}", what,
                                        net::name_of(least), turn.sender.str());
    if (std::has_single_bit(++self.counters_.messages_forbidden))
      log().warn("refused a message ({} so far): {}", self.counters_.messages_forbidden, printable(why));
    if (std::holds_alternative<wire::Hello>(message)) self.count_refused(why, turn.now);
    if (request != nullptr)
      self.reply(turn, wire::AdminReply{.token = request->token, .text = why});
    else
      self.reply(turn, wire::Refused{.reason = why});
    return false;
  }

 private:
  /// Returns the newest incarnation known under this namespace and engine id, or 0 if none is known.
  std::uint64_t newest_of(const NodeInfo& info) const {
    const std::optional<NodeId> id = self.directory_.find_node(info.name_space, info.engine_id.value);
    const std::uint64_t here = id ? self.directory_.node(*id)->info.incarnation.value : 0;
    return self.observer_ == nullptr ? here : std::max(here, self.observer_->newest(info).value);
  }

  /// Returns true if the request drains a node that the sender, a member, has registered. The role kWorker is enough
  /// for such a request, so that a worker can empty its node before it stops.
  bool drains_own_node(const wire::AdminRequest& request) const {
    if (request.verb != "drain" || turn.sender.role < net::Role::kWorker || turn.sender.name.empty()) return false;
    const std::optional<NodeId> id = self.directory_.find_node(request.name_space, request.engine_id);
    return id && self.directory_.node(*id)->info.details.member == turn.sender.name;
  }

  std::optional<std::string> refusal(const wire::Hello& hello) const {
    const std::string name = fmt::format("node '{}'", hello.node.engine_id);
    const Result<std::uint32_t> common =
        common_version("controller protocol", {"this controller", kvferry::version(), self.protocol_},
                       {name, hello.node.version, spoken_by(hello)});
    if (!common) return common.error().what;
    if (self.newest_incarnation_ != nullptr && hello.node.incarnation.value > self.newest_incarnation_())
      return fmt::format(
          "{} has incarnation {}, a time too far ahead of this controller's clock; at most {} is allowed now; "
          "synchronise the clocks",
          name, hello.node.incarnation, self.newest_incarnation_());
    if (!turn.sender.owns(hello.node.engine_id.value))
      return fmt::format("{} has the key of {}; its engine id must be '{}', or begin with '{}_' or '{}.'", name,
                         turn.sender.str(), turn.sender.name, turn.sender.name, turn.sender.name);
    return self.observer_ == nullptr ? std::nullopt : self.observer_->refusal(hello.node);
  }

  /// Returns nullptr if the sender must register first. The pointer is valid until sessions change.
  const Session* session_of(std::uint64_t incarnation) {
    const Session* found = self.session(turn.from);
    if (found != nullptr && found->incarnation.value == incarnation) return found;
    ++self.counters_.messages_unregistered;
    return nullptr;
  }

  void send_unregistered(std::uint64_t incarnation) {
    self.reply(turn, wire::Unregistered{.incarnation = incarnation});
  }

  void request_repair_if(Update update, const Session& session) {
    if (update == Update::kRepairWanted) self.request_repair(turn, session);
  }

  /// Returns the endpoints of the replicas if the node does not have the newest list of them. Otherwise returns an
  /// empty list.
  std::vector<std::string> new_replicas() {
    if (self.observer_ == nullptr) return {};
    const std::uint64_t version = self.observer_->replicas_version();
    if (std::exchange(self.sessions_.at(turn.from).replicas_version, version) == version) return {};
    return self.observer_->replicas();
  }
};

void Sessions::receive(ConnectionId from, std::string_view bytes, TimeNs now, ReplySender& replies,
                       const net::Identity& sender, bool is_over_share) {
  Receiver receiver{*this, {from, now, replies, bytes, protocol_.newest, sender, is_over_share}};
  ++counters_.messages_taken;
  if (const auto lookup = wire::read_lookup(bytes, protocol_)) {
    receiver.turn.version = lookup->version;
    return receiver(*lookup);
  }
  if (is_over_share && bytes.size() > kOverShareBytesMax) return;
  Result<wire::FromNode> message = wire::parse<wire::FromNode>(bytes, protocol_);
  if (message) {
    receiver.turn.version = std::visit([](const auto& body) { return body.header.version; }, *message);
    if (receiver.is_allowed(*message)) std::visit(receiver, *message);
  } else if (message.error().code == ErrorCode::kRefused) {
    count_refused(message.error().what, now);
    reply(receiver.turn, wire::Refused{.reason = message.error().what});
  } else {
    count_malformed(message.error().what);
  }
  send_orders();
}

void Sessions::request_repair(const Turn& turn, const Session& session) {
  const Repair repair = directory_.repair(session.node);
  ++(repair.resend_will_do ? counters_.resends_wanted : counters_.snapshots_wanted);
  reply(turn, wire::SnapshotWanted{.incarnation = session.incarnation.value,
                                   .next_sequence = repair.heard_below,
                                   .resend_will_do = repair.resend_will_do,
                                   .resend_from = repair.resend_from});
}

template <class Message>
void Sessions::reply(const Turn& turn, Message message) {
  message.header.version = turn.version;
  count_reply(turn.replies.send(turn.from, encode(message)));
}

}  // namespace kvferry::controller
