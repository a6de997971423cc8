#include "controller/client.h"

#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <optional>
#include <set>

#include "controller/endpoint.h"
#include "controller/publisher.h"
#include "controller/wake_up.h"
#include "controller/wire.h"
#include "controller/zmq_io.h"
#include "transport/base/log.h"
#include "transport/base/owned_fd.h"

namespace kvferry::controller {
namespace {

constexpr int kSendQueueMax = 10'000;        // publishes of a whole snapshot fit: 160 million chunks
constexpr std::size_t kPendingMax = 16'384;  // look-ups without a reply that are remembered; the oldest fall out
constexpr int kLeaveLingerMs = 150;
constexpr std::int64_t kNewsBeatMs = 100;
constexpr std::uint64_t kTtlMsMax = 24ULL * 3600 * 1000;        // of any wish of the controller
constexpr std::size_t kResendBytesMax = std::size_t{16} << 20;  // a second of a million keys

TimeNs ttl_of(std::uint64_t ms) { return static_cast<TimeNs>(std::min(ms, kTtlMsMax)) * kMillisecond; }

class ZmqClient final : public Client {
 public:
  explicit ZmqClient(ClientOptions options) : options_(std::move(options)) {}

  Result<void> connect() {
    try {
      set_common_options(socket_, options_.controller);
      // Only send on a live connection: what is queued for a dead controller would reach the next one as old news.
      socket_.set(zmq::sockopt::immediate, true);
      socket_.set(zmq::sockopt::sndhwm, kSendQueueMax);
      socket_.set(zmq::sockopt::reconnect_ivl, 100);
      socket_.set(zmq::sockopt::reconnect_ivl_max, 1000);
      socket_.set(zmq::sockopt::connect_timeout, 2000);
      socket_.connect(options_.controller);
      return watch(socket_.get(zmq::sockopt::fd)) && watch(wake_up_.fd())
                 ? Result<void>{}
                 : Error{ErrorCode::kUnavailable, "no file descriptor left for the controller's client"};
    } catch (const zmq::error_t& failure) {
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("can't connect to {}: {}", options_.controller, failure.what())};
    }
  }

  int fd() const override { return epoll_.get(); }
  bool registered() const override { return state_ == State::kRegistered; }
  const std::string& controller() const override { return options_.controller; }

  std::vector<ClientEvent> process(TimeNs now) override {
    std::vector<ClientEvent> events;
    wake_up_.clear();
    zmq::message_t frame;
    for (std::size_t num_frames = 0; (num_frames = try_receive(socket_, &frame, 1)) > 0;) {
      if (num_frames != 1) continue;
      Result<wire::Message> message = wire::parse(frame.to_string_view());
      if (!message) continue;  // another version's words; its Refused would have been readable
      waiting_since_.reset();
      std::visit([&](auto& body) { on(body, events); }, *message);
    }
    if (waiting_since_ && now - *waiting_since_ > options_.lost_after_ms * kMillisecond) {
      if (state_ == State::kRegistered)
        lose(fmt::format("no word from controller {} for {} ms", options_.controller, options_.lost_after_ms), events);
      reconnect();
    }
    speak(now);
    return events;
  }

  void publish(const std::vector<ChunkEntry>& chunks) override {
    if (!is_over()) publisher_.publish(chunks);
  }
  void evict(const std::vector<ChunkKey>& keys) override {
    if (!is_over()) publisher_.evict(keys);
  }
  void end_snapshot() override {
    if (!is_over()) publisher_.end_snapshot();
  }

  Result<std::uint64_t> lookup(const LookupQuery& query) override {
    const std::size_t num_keys = query.keys.size() + query.tail_groups.size() + query.exact_tails.size();
    if (num_keys > wire::kKeysPerLookupMax) {
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("a look-up of {} keys; at most {} are allowed", num_keys, wire::kKeysPerLookupMax)};
    }
    if (!registered())
      return Error{ErrorCode::kUnavailable, fmt::format("not registered with controller {}", options_.controller)};
    const std::uint64_t token = ++last_token_;
    if (!send(wire::Lookup{.incarnation = incarnation(),
                           .token = token,
                           .keys = {query.keys},
                           .tail_groups = {query.tail_groups},
                           .exact_tails = {query.exact_tails}})) {
      return Error{ErrorCode::kUnavailable, fmt::format("controller {} is not connected", options_.controller)};
    }
    if (pending_.size() == kPendingMax) pending_.erase(pending_.begin());
    pending_.insert(token);
    return token;
  }

  void leave() override {
    if (state_ == State::kRegistered) {
      send(wire::Leave{.incarnation = incarnation()});
      socket_.set(zmq::sockopt::linger, kLeaveLingerMs);  // the destructor gives it so long to get out
    }
    state_ = State::kLeft;
    pending_.clear();
  }

 private:
  enum class State { kConnecting, kRegistered, kRefused, kLeft };

  bool watch(int fd) {
    epoll_event event{.events = EPOLLIN, .data = {}};
    return ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
  }
  std::uint64_t incarnation() const { return options_.node.incarnation.value; }
  bool is_over() const { return state_ == State::kRefused || state_ == State::kLeft; }

  /// Says what is due: Hello while not registered, else a heartbeat, which comes earlier after news: it tells whether
  /// the last of them was lost.
  void speak(TimeNs now) {
    const bool has_news = state_ == State::kRegistered && publisher_.next_sequence() != beat_sequence_;
    const std::int64_t wait_ms = has_news ? std::min(options_.heartbeat_ms, kNewsBeatMs) : options_.heartbeat_ms;
    const bool due = !spoke_at_ || now - *spoke_at_ >= wait_ms * kMillisecond;
    if (!due || (state_ != State::kConnecting && state_ != State::kRegistered)) return;
    bool sent = false;
    if (state_ == State::kConnecting) {
      const NodeInfo& node = options_.node;
      sent = send(wire::Hello{.name_space = node.name_space,
                              .engine_id = node.engine_id.value,
                              .incarnation = incarnation(),
                              .role = node.role,
                              .endpoint = node.endpoint,
                              .fingerprint = node.fingerprint,
                              .next_sequence = publisher_.next_sequence()});
    } else {
      const TierDigests& digests = publisher_.digests();
      sent = send(wire::Heartbeat{.incarnation = incarnation(),
                                  .next_sequence = publisher_.next_sequence(),
                                  .digests = {digests.begin(), digests.end()}});
      if (sent) beat_sequence_ = publisher_.next_sequence();
    }
    // Silence counts from the oldest question without an answer; a Hello that found no connection asked nobody.
    if (!waiting_since_ && (sent || state_ == State::kRegistered)) waiting_since_ = now;
    if (sent) spoke_at_ = now;  // else again at the next call: fd() fires when the connection is up
  }

  void on(const wire::Registered& message, std::vector<ClientEvent>& events) {
    if (state_ != State::kConnecting || message.incarnation != incarnation()) return;  // the answer to a repeated Hello
    state_ = State::kRegistered;
    events.emplace_back(Registered{});
    if (!message.snapshot_wanted) return;
    publisher_.begin_snapshot();
    events.emplace_back(SnapshotWanted{});
  }
  void on(wire::Refused& message, std::vector<ClientEvent>& events) {
    if (state_ != State::kConnecting && state_ != State::kRegistered) return;
    state_ = State::kRefused;
    pending_.clear();
    events.emplace_back(Refused{std::move(message.reason)});
  }
  void on(const wire::SnapshotWanted& message, std::vector<ClientEvent>& events) {
    if (state_ != State::kRegistered || message.incarnation != incarnation()) return;
    if (publisher_.answer(message) == Publisher::Answer::kSnapshotBegun) events.emplace_back(SnapshotWanted{});
  }
  void on(const wire::Unregistered& message, std::vector<ClientEvent>& events) {
    if (state_ != State::kRegistered || message.incarnation != incarnation()) return;
    lose(fmt::format("controller {} does not know this node any more: it restarted, or heard nothing for too long",
                     options_.controller),
         events);
    spoke_at_.reset();  // it is there: say Hello at once
  }
  void on(wire::LookupReply& message, std::vector<ClientEvent>& events) {
    if (pending_.erase(message.token) == 0) return;
    LookupReply reply{message.token, {}, message.index_version};
    for (wire::HolderFields& holder : message.holders) {
      Result<std::vector<ChunkEntry>> tails = wire::from_columns(holder.tails);
      if (!tails) return;  // as if lost; the caller keeps a deadline
      reply.holders.push_back({EngineId{std::move(holder.engine_id)}, Incarnation{holder.incarnation},
                               std::move(holder.endpoint), holder.num_full_chunks, std::move(*tails),
                               wire::tier_of(holder.tier).value_or(Tier::kRemote), holder.confirmed});
    }
    events.emplace_back(std::move(reply));
  }
  bool is_for_us(std::uint64_t incarnation_named) const {
    return state_ == State::kRegistered && incarnation_named == incarnation();
  }
  void on(wire::Keep& message, std::vector<ClientEvent>& events) {
    if (is_for_us(message.incarnation))
      events.emplace_back(KeepWanted{message.hold, std::move(message.keys.keys), ttl_of(message.ttl_ms)});
  }
  void on(const wire::Unkeep& message, std::vector<ClientEvent>& events) {
    if (is_for_us(message.incarnation)) events.emplace_back(UnkeepWanted{message.hold});
  }
  void on(wire::Bring& message, std::vector<ClientEvent>& events) {
    Result<std::vector<ChunkEntry>> chunks = wire::from_columns(message.tails);
    if (!is_for_us(message.incarnation) || !chunks) return;
    for (const ChunkKey& key : message.full.keys) chunks->push_back({.key = key, .tail_group = {}});
    events.emplace_back(BringWanted{EngineId{std::move(message.engine_id)}, std::move(message.endpoint),
                                    std::move(*chunks), ttl_of(message.ttl_ms)});
  }
  void on(wire::Forget& message, std::vector<ClientEvent>& events) {
    if (is_for_us(message.incarnation)) events.emplace_back(ForgetWanted{message.all, std::move(message.keys.keys)});
  }
  /// HeartbeatAck has done its work by being a word; the rest only nodes send.
  template <class T>
  void on(const T&, std::vector<ClientEvent>&) {}

  void lose(std::string reason, std::vector<ClientEvent>& events) {
    state_ = State::kConnecting;
    waiting_since_.reset();
    pending_.clear();
    events.emplace_back(Lost{std::move(reason)});
  }

  /// A connection that died without a word looks alive to TCP for minutes, so a silent one is given up for a new one.
  void reconnect() {
    waiting_since_.reset();
    spoke_at_.reset();
    try {
      socket_.disconnect(options_.controller);
      socket_.connect(options_.controller);
    } catch (const zmq::error_t& failure) {
      log().error("can't connect to {} again: {}", options_.controller, failure.what());
    }
  }

  template <class T>
  bool send(const T& message) {
    return send_bytes(encode(message));
  }
  bool send_bytes(std::string_view bytes) {
    const bool sent = try_send(socket_, bytes);
    // Sending may have swallowed the edge that tells of a waiting message, so fd() is raised by hand.
    if ((socket_.get(zmq::sockopt::events) & ZMQ_POLLIN) != 0) wake_up_.raise();
    return sent;
  }

  ClientOptions options_;
  State state_ = State::kConnecting;
  std::optional<TimeNs> spoke_at_;       // last Hello or Heartbeat that got out
  std::uint64_t beat_sequence_ = 0;      // told by the last heartbeat
  std::optional<TimeNs> waiting_since_;  // oldest Hello or Heartbeat since the controller's last word
  Publisher publisher_{options_.node.incarnation, kResendBytesMax, [this](std::string_view bytes) {
                         if (registered()) send_bytes(bytes);
                       }};
  std::uint64_t last_token_ = 0;
  std::set<std::uint64_t> pending_;
  WakeUp wake_up_;
  OwnedFd epoll_{::epoll_create1(EPOLL_CLOEXEC)};
  zmq::context_t context_{1};
  zmq::socket_t socket_{context_, zmq::socket_type::dealer};
};

}  // namespace

Result<std::unique_ptr<Client>> make_client(ClientOptions options) {
  if (Result<void> checked = check_endpoint(options.controller, EndpointUse::kConnect); !checked)
    return std::move(checked).error();
  auto client = std::make_unique<ZmqClient>(std::move(options));
  if (Result<void> connected = client->connect(); !connected) return std::move(connected).error();
  return std::unique_ptr<Client>(std::move(client));
}

Result<void> wait_registered(Client& client, const Clock& clock, std::int64_t timeout_ms) {
  const TimeNs deadline = clock.now() + timeout_ms * kMillisecond;
  for (;;) {
    for (const ClientEvent& event : client.process(clock.now())) {
      if (const auto* refused = std::get_if<Refused>(&event)) {
        return Error{ErrorCode::kRefused,
                     fmt::format("controller {} refused this node: {}", client.controller(), refused->reason)};
      }
      if (std::holds_alternative<SnapshotWanted>(event)) client.end_snapshot();
    }
    if (client.registered()) return {};
    const TimeNs left = deadline - clock.now();
    if (left <= 0) {
      return Error{ErrorCode::kUnavailable, fmt::format("controller {} not reachable within {} ms; start it with "
                                                        "`kvferry controller`, or name another one by the key "
                                                        "`controller`",
                                                        client.controller(), timeout_ms)};
    }
    pollfd item{client.fd(), POLLIN, 0};
    ::poll(&item, 1, static_cast<int>(std::min<TimeNs>(left / kMillisecond + 1, 100)));
  }
}

}  // namespace kvferry::controller
