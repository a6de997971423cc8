#include "controller/client/client_session.h"

#include <algorithm>

#include "controller/protocol/wire.h"

namespace kvferry::controller {
namespace {

constexpr std::size_t kPendingMax = 16'384;  // look-ups without a reply that are remembered; the oldest fall out
constexpr std::int64_t kNewsBeatMs = 100;
constexpr std::int64_t kLoadBeatMs = 200;
constexpr std::uint32_t kDoublingsMax = 2;                // of the patience with a controller that answers no Hello
constexpr std::uint64_t kTtlMsMax = 24ULL * 3600 * 1000;  // of any wish of the controller

TimeNs ttl_of(std::uint64_t ms) { return static_cast<TimeNs>(std::min(ms, kTtlMsMax)) * kMillisecond; }

}  // namespace

ClientSession::ClientSession(ClientOptions options, Send send, std::size_t resend_bytes_max)
    : options_(std::move(options)),
      send_(std::move(send)),
      publisher_(options_.node.incarnation, resend_bytes_max, [this](std::string_view bytes) {
        if (is_registered()) this->send(bytes);
      }) {
  if (options_.protocol.newest == 0) options_.protocol = wire::kProtocol;
  version_ = options_.protocol.oldest;
}

void ClientSession::take(std::string_view bytes, std::vector<ClientEvent>& events) {
  Result<wire::Message> message = wire::parse(bytes, options_.protocol);
  if (!message) return;  // another version's words; its Refused would have been readable
  waiting_since_.reset();
  num_silences_ = 0;
  std::visit([&](auto& body) { on(body, events); }, *message);
}

bool ClientSession::check_silence(TimeNs now, std::vector<ClientEvent>& events) {
  // Where a thousand nodes join at once their Hellos queue up; each that is repeated makes the queue longer.
  const TimeNs patience = (options_.lost_after_ms * kMillisecond) << std::min(num_silences_, kDoublingsMax);
  if (!waiting_since_ || now - *waiting_since_ <= patience) return false;
  if (is_registered())
    lose(fmt::format("no word from controller {} for {} ms", options_.controller, options_.lost_after_ms), events);
  else
    ++num_silences_;
  waiting_since_.reset();
  spoke_at_.reset();
  return true;
}

/// Hello while not registered, else a heartbeat, which comes earlier after news: it tells whether the last of them was
/// lost.
void ClientSession::speak(TimeNs now) {
  const bool has_news = is_registered() && publisher_.next_sequence() != beat_sequence_;
  const bool has_load = is_registered() && load_ != beat_load_;
  const std::int64_t wait_ms = std::min(options_.heartbeat_ms, has_news   ? kNewsBeatMs
                                                               : has_load ? kLoadBeatMs
                                                                          : options_.heartbeat_ms);
  const bool due = !spoke_at_ || now - *spoke_at_ >= wait_ms * kMillisecond;
  if (!due || is_over()) return;
  bool sent = false;
  if (state_ == State::kConnecting) {
    version_ = options_.protocol.oldest;  // which whoever has one in common reads
    const NodeInfo& node = options_.node;
    sent = send(encode(wire::Hello{.name_space = node.name_space,
                                   .engine_id = node.engine_id.value,
                                   .incarnation = incarnation(),
                                   .role = node.role,
                                   .endpoint = node.endpoint,
                                   .fingerprint = node.fingerprint,
                                   .next_sequence = publisher_.next_sequence(),
                                   .serves = node.serves,
                                   .version = node.version.empty() ? KVFERRY_VERSION : node.version,
                                   .oldest_protocol = options_.protocol.oldest,
                                   .newest_protocol = options_.protocol.newest}));
    beat_load_ = 0;  // a controller that does not know the node knows no load of it
  } else {
    const TierDigests& digests = publisher_.digests();
    sent = send(encode(wire::Heartbeat{.incarnation = incarnation(),
                                       .next_sequence = publisher_.next_sequence(),
                                       .digests = {digests.begin(), digests.end()},
                                       .load = load_}));
    if (sent) beat_sequence_ = publisher_.next_sequence();
    if (sent) beat_load_ = load_;
  }
  // Silence counts from the oldest question without an answer; a Hello that found no connection asked nobody.
  if (!waiting_since_ && (sent || is_registered())) waiting_since_ = now;
  if (sent) spoke_at_ = now;  // else again at the next call: fd() fires when the connection is up
}

void ClientSession::broken(std::vector<ClientEvent>& events) {
  if (is_over()) return;
  waiting_since_.reset();
  num_silences_ = 0;
  spoke_at_.reset();
  if (is_registered()) lose(fmt::format("the connection to controller {} broke", options_.controller), events);
}

Result<void> check_lookup(const LookupQuery& query) {
  const std::size_t num_keys = LookupView(query).num_keys();
  if (num_keys <= wire::kKeysPerLookupMax) return {};
  return Error{ErrorCode::kInvalidArgument,
               fmt::format("a look-up of {} keys; at most {} are allowed", num_keys, wire::kKeysPerLookupMax)};
}

Result<std::uint64_t> ClientSession::lookup(const LookupQuery& query) {
  if (Result<void> checked = check_lookup(query); !checked) return std::move(checked).error();
  if (!is_registered())
    return Error{ErrorCode::kUnavailable, fmt::format("not registered with controller {}", options_.controller)};
  const std::uint64_t token = ++last_token_;
  if (!send(encode(wire::Lookup{.incarnation = incarnation(),
                                .token = token,
                                .keys = {query.keys},
                                .tail_groups = {query.tail_groups},
                                .exact_tails = {query.exact_tails}}))) {
    return Error{ErrorCode::kUnavailable, fmt::format("controller {} is not connected", options_.controller)};
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

void ClientSession::on(const wire::Registered& message, std::vector<ClientEvent>& events) {
  if (state_ != State::kConnecting || message.incarnation != incarnation()) return;  // the answer to a repeated Hello
  state_ = State::kRegistered;
  version_ = message.header.version;
  events.emplace_back(Registered{});
  if (!message.snapshot_wanted) return;
  publisher_.begin_snapshot();
  events.emplace_back(SnapshotWanted{});
}

void ClientSession::on(wire::Refused& message, std::vector<ClientEvent>& events) {
  if (is_over()) return;
  state_ = State::kRefused;
  pending_.clear();
  events.emplace_back(Refused{std::move(message.reason)});
}

void ClientSession::on(const wire::SnapshotWanted& message, std::vector<ClientEvent>& events) {
  if (!is_registered() || message.incarnation != incarnation()) return;
  if (publisher_.answer(message) == Publisher::Answer::kSnapshotBegun) events.emplace_back(SnapshotWanted{});
}

void ClientSession::on(const wire::Unregistered& message, std::vector<ClientEvent>& events) {
  if (!is_registered() || message.incarnation != incarnation()) return;
  lose(fmt::format("controller {} does not know this node any more: it restarted, or heard nothing for too long",
                   options_.controller),
       events);
  spoke_at_.reset();  // it is there: say Hello at once
}

void ClientSession::on(wire::LookupReply& message, std::vector<ClientEvent>& events) {
  if (pending_.erase(message.token) == 0) return;
  LookupReply reply{message.token, {}, message.index_version};
  reply.holders.reserve(message.holders.size());
  for (wire::HolderFields& holder : message.holders) {
    Result<std::vector<ChunkEntry>> tails = wire::from_columns(holder.tails);
    if (!tails) return;  // as if lost; the caller keeps a deadline
    reply.holders.push_back({EngineId{std::move(holder.engine_id)}, Incarnation{holder.incarnation},
                             std::move(holder.endpoint), holder.num_full_chunks, std::move(*tails),
                             wire::tier_of(holder.tier).value_or(Tier::kRemote), holder.confirmed});
  }
  events.emplace_back(std::move(reply));
}

void ClientSession::on(const wire::HeartbeatAck& message, std::vector<ClientEvent>&) {
  if (message.incarnation == incarnation()) publisher_.set_kept_below(message.kept_below);
}

void ClientSession::on(wire::Pin& message, std::vector<ClientEvent>& events) {
  if (is_for_us(message.incarnation))
    events.emplace_back(PinChunks{message.hold, std::move(message.keys.keys), ttl_of(message.ttl_ms)});
}

void ClientSession::on(const wire::Unpin& message, std::vector<ClientEvent>& events) {
  if (is_for_us(message.incarnation)) events.emplace_back(UnpinChunks{message.hold});
}

void ClientSession::on(wire::Replicate& message, std::vector<ClientEvent>& events) {
  Result<std::vector<ChunkEntry>> chunks = wire::from_columns(message.tails);
  if (!is_for_us(message.incarnation) || !chunks) return;
  for (const ChunkKey& key : message.full.keys) chunks->push_back({.key = key, .tail_group = {}});
  events.emplace_back(ReplicateChunks{EngineId{std::move(message.engine_id)}, std::move(message.endpoint),
                                  std::move(*chunks), ttl_of(message.ttl_ms)});
}

void ClientSession::on(wire::EvictOrder& message, std::vector<ClientEvent>& events) {
  if (is_for_us(message.incarnation)) events.emplace_back(EvictChunks{message.all, std::move(message.keys.keys)});
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
