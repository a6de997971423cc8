#include "controller/client/client_session.h"

#include <algorithm>
#include <bit>

#include "controller/protocol/wire.h"
#include "transport/base/log.h"
#include "transport/base/printable.h"

namespace kvferry::controller {
namespace {

// Limit on unanswered lookups; above this limit the oldest lookups are dropped.
constexpr std::size_t kPendingMax = 16'384;
constexpr std::int64_t kNewsBeatMs = 100;
constexpr std::int64_t kLoadBeatMs = 200;
constexpr std::uint32_t kHelloDoublingsMax = 2;           // limit on how often the wait for an answer to Hello doubles
constexpr std::uint64_t kTtlMsMax = 24ULL * 3600 * 1000;  // limit on the ttl_ms of an order

TimeNs ttl_of(std::uint64_t ms) { return static_cast<TimeNs>(std::min(ms, kTtlMsMax)) * kMillisecond; }

}  // namespace

/// Handles the controller's messages. A message for another incarnation of the node is late and ignored.
struct ClientSession::Receiver {
  ClientSession& session;
  std::vector<ClientEvent>& events;

  bool is_for_us(std::uint64_t incarnation) const {
    return session.is_registered() && incarnation == session.incarnation();
  }

  void operator()(const wire::Registered& message) const {
    if (session.state_ != State::kConnecting || message.incarnation != session.incarnation()) return;
    session.state_ = State::kRegistered;
    session.version_ = message.header.version;
    events.emplace_back(Registered{});
    if (!message.snapshot_wanted) return;
    session.publisher_.begin_snapshot();
    events.emplace_back(SnapshotWanted{});
  }
  void operator()(wire::Refused& message) const {
    if (session.is_over()) return;
    session.state_ = State::kRefused;
    session.pending_.clear();
    events.emplace_back(Refused{printable(message.reason, kPeerTextMax), Incarnation{message.newest_incarnation}});
  }
  void operator()(const wire::HeartbeatAck& message) const {
    if (message.incarnation == session.incarnation()) session.publisher_.set_kept_below(message.kept_below);
  }
  void operator()(wire::LookupReply& message) const {
    if (session.pending_.erase(message.token) == 0) return;
    events.emplace_back(LookupReply{message.token, std::move(message.holders), message.index_version});
  }
  void operator()(const wire::SnapshotWanted& message) const {
    if (is_for_us(message.incarnation) && session.publisher_.answer(message) == Publisher::Answer::kSnapshotBegun)
      events.emplace_back(SnapshotWanted{});
  }
  void operator()(const wire::Unregistered& message) const {
    if (!is_for_us(message.incarnation)) return;
    session.lose(
        fmt::format("controller {} no longer has a registration of this node, e.g. because the controller was started "
                    "again, the node's lease expired or a newer process has the node's engine id",
                    session.options_.controller),
        events);
    session.sent_at_.reset();  // the controller is reachable, so the next Hello need not wait
  }
  void operator()(wire::Pin& message) const {
    if (is_for_us(message.incarnation))
      events.emplace_back(PinChunks{message.pin_id, std::move(message.keys.keys), ttl_of(message.ttl_ms)});
  }
  void operator()(const wire::Unpin& message) const {
    if (is_for_us(message.incarnation)) events.emplace_back(UnpinChunks{message.pin_id});
  }
  void operator()(wire::Replicate& message) const {
    Result<std::vector<ChunkEntry>> chunks = wire::join_entries(message.full, message.tails);
    if (!is_for_us(message.incarnation) || !chunks) return;
    events.emplace_back(ReplicateChunks{EngineId{std::move(message.engine_id)}, std::move(message.endpoint),
                                        std::move(*chunks), ttl_of(message.ttl_ms), std::move(message.member)});
  }
  void operator()(wire::EvictOrder& message) const {
    if (is_for_us(message.incarnation)) events.emplace_back(EvictChunks{message.all, std::move(message.keys.keys)});
  }
  void operator()(wire::PurgeOrder& message) const {
    if (is_for_us(message.incarnation)) events.emplace_back(PurgeChunks{message.purge_id, std::move(message.giver)});
  }
  // These messages are never received here: they answer the requests of ask.cpp, which uses a connection of its own.
  void operator()(const wire::AdminReply&) const {}
  void operator()(const wire::StatusReply&) const {}
};

ClientSession::ClientSession(ClientOptions options, Send send, std::size_t resend_bytes_max)
    : options_(std::move(options)),
      send_(std::move(send)),
      publisher_(options_.node.incarnation, resend_bytes_max, [this](std::string_view bytes) {
        if (is_registered()) this->send(bytes);
      }) {
  if (options_.node.version.empty()) options_.node.version = kvferry::version();
  if (options_.protocol.newest == 0) options_.protocol = wire::kProtocol;
  version_ = options_.protocol.oldest;
}

void ClientSession::receive(std::string_view bytes, std::vector<ClientEvent>& events) {
  Result<wire::FromController> message = wire::parse<wire::FromController>(bytes, options_.protocol);
  if (!message) {  // it is malformed, or of a type or version that this client does not know
    if (std::has_single_bit(++num_unreadable_))
      log().warn("dropped a message of controller {} ({} so far): {}", options_.controller, num_unreadable_,
                 message.error().what);
    return;
  }
  waiting_since_.reset();
  num_silences_ = 0;
  std::visit(Receiver{*this, events}, *message);
}

bool ClientSession::check_silence(TimeNs now, std::vector<ClientEvent>& events) {
  // If many nodes register at once, their Hellos queue up. Repeats make the queue longer, so the wait doubles.
  const TimeNs patience = (options_.lost_after_ms * kMillisecond) << std::min(num_silences_, kHelloDoublingsMax);
  if (!waiting_since_ || now - *waiting_since_ <= patience) return false;
  if (is_registered())
    lose(fmt::format("no message came from controller {} for {} ms", options_.controller, options_.lost_after_ms),
         events);
  else
    ++num_silences_;
  waiting_since_.reset();
  sent_at_.reset();
  return true;
}

void ClientSession::send_due(TimeNs now) {
  const bool has_news = is_registered() && publisher_.next_sequence() != beat_sequence_;
  const bool has_load = is_registered() && load_ != beat_load_;
  const std::int64_t wait_ms = std::min(options_.heartbeat_ms, has_news   ? kNewsBeatMs
                                                               : has_load ? kLoadBeatMs
                                                                          : options_.heartbeat_ms);
  const bool is_due = !sent_at_ || now - *sent_at_ >= wait_ms * kMillisecond;
  if (!is_due || is_over()) return;
  const bool is_sent = state_ == State::kConnecting ? send_hello() : send_heartbeat();
  // Silence counts from the oldest unanswered message. A Hello that was not sent needs no answer.
  if (!waiting_since_ && (is_sent || is_registered())) waiting_since_ = now;
  // If the message was not sent, the next call tries again. If there was no connection, that call comes as soon as
  // there is one, because the link's fd() is readable then.
  if (is_sent) sent_at_ = now;
}

bool ClientSession::send_hello() {
  // The Hello is sent in the oldest version that this client speaks, so that older controllers can read the Hello.
  version_ = options_.protocol.oldest;
  beat_load_ = 0;  // a new registration begins with load 0; if load_ differs, a heartbeat reports it soon
  return send(encode(wire::Hello{.node = options_.node,
                                 .next_sequence = publisher_.next_sequence(),
                                 .oldest_protocol = options_.protocol.oldest,
                                 .newest_protocol = options_.protocol.newest}));
}

bool ClientSession::send_heartbeat() {
  const TierDigests& digests = publisher_.digests();
  const bool is_sent = send(encode(wire::Heartbeat{.incarnation = incarnation(),
                                                   .next_sequence = publisher_.next_sequence(),
                                                   .digests = {digests.begin(), digests.end()},
                                                   .load = load_,
                                                   .wall_ms = options_.wall_ms == nullptr ? 0 : options_.wall_ms(),
                                                   .report = report_}));
  if (!is_sent) return false;
  beat_sequence_ = publisher_.next_sequence();
  beat_load_ = load_;
  report_.clear();
  return true;
}

void ClientSession::broken(std::vector<ClientEvent>& events) {
  if (is_over()) return;
  waiting_since_.reset();
  num_silences_ = 0;
  sent_at_.reset();
  if (is_registered()) lose(fmt::format("the connection to controller {} broke", options_.controller), events);
}

Result<void> check_lookup(const LookupQuery& query) {
  const std::size_t num_keys = LookupView(query).num_keys();
  if (num_keys <= wire::kKeysPerLookupMax) return {};
  return Error{ErrorCode::kInvalidArgument,
               fmt::format("a lookup has {} keys; at most {} are allowed", num_keys, wire::kKeysPerLookupMax)};
}

Result<std::uint64_t> ClientSession::lookup(const LookupQuery& query) {
  KVFERRY_TRY(check_lookup(query));
  if (!is_registered())
    return Error{ErrorCode::kUnavailable,
                 fmt::format("this node is not registered with controller {}, so it can't look up chunks there",
                             options_.controller)};
  const std::uint64_t token = ++last_token_;
  if (!send(encode(wire::Lookup{.incarnation = incarnation(),
                                .token = token,
                                .keys = {query.keys},
                                .tail_groups = {query.tail_groups},
                                .exact_tails = {query.exact_tails}}))) {
    return Error{
        ErrorCode::kUnavailable,
        fmt::format(
            "a lookup can't be sent to controller {}: there is no connection, or too many messages wait to be sent",
            options_.controller)};
  }
  if (pending_.size() == kPendingMax) pending_.erase(pending_.begin());
  pending_.insert(token);
  return token;
}

bool ClientSession::leave() {
  const bool was_registered = is_registered();
  if (was_registered) send(encode(wire::Leave{.incarnation = incarnation()}));
  state_ = State::kLeft;
  pending_.clear();
  return was_registered;
}

bool ClientSession::send(std::string_view bytes) {
  if (wire::version_of(bytes) == version_) return send_(bytes);
  std::string in_version(bytes);
  wire::set_version(in_version, version_);
  return send_(in_version);
}

void ClientSession::lose(std::string reason, std::vector<ClientEvent>& events) {
  state_ = State::kConnecting;
  waiting_since_.reset();
  pending_.clear();
  events.emplace_back(Lost{std::move(reason)});
}

}  // namespace kvferry::controller
