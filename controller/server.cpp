#include "controller/server.h"

#include <atomic>
#include <bit>
#include <unordered_map>

#include "controller/endpoint.h"
#include "controller/wire.h"
#include "controller/zmq_io.h"
#include "transport/base/log.h"

namespace kvferry::controller {
namespace {

constexpr std::chrono::milliseconds kTick{100};  // how often leases are looked at, at least
constexpr int kMessagesPerTickMax = 1024;        // so that a flood can't put off the leases
constexpr int kReceiveQueueMax = 32;             // messages a peer; times kMessageBytesMax bounds what it can pile up
constexpr int kSendQueueMax = 256;               // replies a peer

SnapshotMark mark_of(const wire::Publish& publish) {
  if (publish.begins_snapshot) return publish.has_end ? SnapshotMark::kBegins : SnapshotMark::kReplaces;
  return publish.ends_snapshot ? SnapshotMark::kEnds : SnapshotMark::kNone;
}

/// kCorrupt: columns of unequal length, or a tier that this version doesn't know.
Result<std::vector<ChunkEntry>> chunks_of(const wire::Publish& publish) {
  if (!wire::tier_of(publish.tier)) {
    return Error{ErrorCode::kCorrupt, fmt::format("tier {}; 0 to {} are allowed", publish.tier, kNumTiers - 1)};
  }
  Result<std::vector<ChunkEntry>> chunks = wire::from_columns(publish.tails);
  if (!chunks) return chunks;
  chunks->reserve(chunks->size() + publish.full.keys.size());
  for (const ChunkKey& key : publish.full.keys) chunks->push_back({.key = key, .tail_group = {}});
  return chunks;
}

class ZmqServer final : public Server {
 public:
  ZmqServer(const ServerOptions& options, const Clock& clock)
      : clock_(clock), directory_(options.directory), started_at_(clock.now()) {}

  Result<void> listen(std::string bind) {
    // ZeroMQ listens on addresses and interfaces, not on names; this is the one name with a meaning that can't move.
    constexpr std::string_view kLocalhost = "tcp://localhost:";
    if (bind.starts_with(kLocalhost)) bind.replace(0, kLocalhost.size(), "tcp://127.0.0.1:");
    try {
      set_common_options(router_, bind);
      router_.set(zmq::sockopt::router_mandatory, true);  // a reply to nobody is counted, not lost in silence
      router_.set(zmq::sockopt::rcvhwm, kReceiveQueueMax);
      router_.set(zmq::sockopt::sndhwm, kSendQueueMax);
      router_.bind(bind);
      endpoint_ = router_.get(zmq::sockopt::last_endpoint);
      return {};
    } catch (const zmq::error_t& failure) {
      const bool not_ours = failure.num() == ENODEV || failure.num() == EADDRNOTAVAIL;
      return Error{ErrorCode::kUnavailable,
                   fmt::format("can't listen on {}: {}{}", bind, failure.what(),
                               not_ours ? "; HOST must be *, or an address or interface of this machine" : "")};
    }
  }

  const std::string& endpoint() const override { return endpoint_; }

  void run() override {
    while (!stopping_.load(std::memory_order_acquire)) {
      wait();  // 1. sleep until a message, stop() or the next tick
      const TimeNs now = clock_.now();
      for (int i = 0; i < kMessagesPerTickMax && take_one(now); ++i) {  // 2. words of life are heard ...
      }
      expire(now);  // 3. ... before the silent are forgotten
    }
  }

  void stop() override {
    stopping_.store(true, std::memory_order_release);
    wake_up_.raise();
  }

 private:
  struct Session {
    NodeId node;
    Incarnation incarnation;
  };
  struct Peer {
    std::string routing_id;
    std::string name;  // for logs
  };

  void wait() {
    zmq::pollitem_t items[] = {{router_.handle(), 0, ZMQ_POLLIN, 0}, {nullptr, wake_up_.fd(), ZMQ_POLLIN, 0}};
    try {
      zmq::poll(items, std::size(items), kTick);
    } catch (const zmq::error_t&) {
      // EINTR: the loop comes back at once.
    }
  }

  bool take_one(TimeNs now) {
    zmq::message_t frames[2];  // routing id, payload
    const std::size_t num_frames = try_receive(router_, frames, std::size(frames));
    if (num_frames == 0) return false;
    const std::string peer = frames[0].to_string();
    if (num_frames != std::size(frames)) {
      count_malformed(fmt::format("{} frames instead of one", num_frames - 1));
      return true;
    }
    Result<wire::Message> message = wire::parse(frames[1].to_string_view());
    if (!message) {
      if (message.error().code == ErrorCode::kRefused) {
        ++counters_.nodes_refused;
        reply(peer, wire::Refused{.reason = message.error().what});
      } else {
        count_malformed(message.error().what);
      }
      return true;
    }
    std::visit([&](auto& body) { on(peer, body, now); }, *message);
    return true;
  }

  void on(const std::string& peer, wire::Hello& hello, TimeNs now) {
    const NodeInfo info{
        EngineId{hello.engine_id}, Incarnation{hello.incarnation}, hello.role, hello.endpoint, hello.name_space,
        hello.fingerprint};
    Result<Joined> joined = directory_.join(info, hello.next_sequence, now);
    if (!joined) {
      ++counters_.nodes_refused;
      log().warn("refused a node: {}", joined.error().what);
      reply(peer, wire::Refused{.reason = joined.error().what});
      return;
    }
    if (joined->fenced) {
      ++counters_.nodes_fenced;
      log().info("node {} is replaced by incarnation {}", peers_.at(*joined->fenced).name, info.incarnation);
      end_session(*joined->fenced);
    }
    if (const auto other = sessions_.find(peer); other != sessions_.end() && other->second.node != joined->id) {
      // One connection, one node: whoever spoke here before has to say Hello on a connection of its own.
      peers_.erase(other->second.node);
      sessions_.erase(other);
    }
    const auto known = peers_.find(joined->id);
    if (known == peers_.end()) {
      ++counters_.nodes_registered;
      log().info("node '{}' of namespace '{}' registered: incarnation {}, role {}, at {}", info.engine_id,
                 info.name_space, info.incarnation, info.role, info.endpoint);
    } else {
      sessions_.erase(known->second.routing_id);  // it comes back on a new connection
    }
    peers_[joined->id] = Peer{peer, fmt::format("'{}' of namespace '{}'", info.engine_id, info.name_space)};
    sessions_[peer] = Session{joined->id, info.incarnation};
    reply(peer, wire::Registered{.incarnation = hello.incarnation, .snapshot_wanted = joined->snapshot_wanted});
    if (joined->resend_wanted) want_repair(peer, sessions_[peer]);
  }

  void on(const std::string& peer, const wire::Heartbeat& heartbeat, TimeNs now) {
    ++counters_.heartbeats;
    const Session* session = session_of(peer, heartbeat.incarnation);
    if (session == nullptr) return send_unregistered(peer, heartbeat.incarnation);
    const std::uint64_t num_differed = directory_.num_digests_differed();
    if (directory_.heartbeat(session->node, heartbeat.next_sequence, now, heartbeat.digests) == Update::kRepairWanted)
      want_repair(peer, *session);
    if (directory_.num_digests_differed() != num_differed)
      log().warn("node {} holds something else than is known of it; it is asked for everything",
                 peers_.at(session->node).name);
    reply(peer, wire::HeartbeatAck{.incarnation = heartbeat.incarnation});
  }

  void on(const std::string& peer, const wire::Publish& publish, TimeNs now) {
    const Session* session = session_of(peer, publish.incarnation);
    if (session == nullptr) return;  // its next heartbeat is told
    Result<std::vector<ChunkEntry>> chunks = chunks_of(publish);
    if (!chunks) {
      count_malformed(chunks.error().what);
      // Its number counts all the same: sent again it would be no better, and hold up all that follows.
      chunks = std::vector<ChunkEntry>{};
    }
    counters_.chunks_published += chunks->size();
    const Tier tier = wire::tier_of(publish.tier).value_or(Tier::kHost);
    const Update update = directory_.publish(session->node, publish.sequence, mark_of(publish), *chunks, now, tier);
    if (update == Update::kRepairWanted) want_repair(peer, *session);
  }

  void on(const std::string& peer, const wire::Evict& evict, TimeNs now) {
    const Session* session = session_of(peer, evict.incarnation);
    if (session == nullptr) return;
    counters_.chunks_evicted += evict.keys.keys.size();
    if (directory_.evict(session->node, evict.sequence, evict.keys.keys, now) == Update::kRepairWanted)
      want_repair(peer, *session);
  }

  void on(const std::string& peer, wire::Lookup& lookup, TimeNs now) {
    const Session* session = session_of(peer, lookup.incarnation);
    if (session == nullptr) return send_unregistered(peer, lookup.incarnation);
    const LookupQuery query{std::move(lookup.keys.keys), std::move(lookup.tail_groups.keys),
                            std::move(lookup.exact_tails.keys)};
    if (query.keys.size() + query.tail_groups.size() + query.exact_tails.size() > wire::kKeysPerLookupMax)
      return count_malformed("a look-up of too many keys");
    Result<std::vector<Holder>> holders = directory_.lookup(session->node, query, now);
    if (!holders) return send_unregistered(peer, lookup.incarnation);
    ++counters_.lookups;
    counters_.lookup_keys += query.keys.size();
    if (!holders->empty()) ++counters_.lookup_hits;
    wire::LookupReply answer{.token = lookup.token, .holders = {}, .index_version = directory_.index_version()};
    for (const Holder& holder : *holders) {
      answer.holders.push_back({holder.engine_id.value, holder.incarnation.value, holder.endpoint,
                                holder.num_full_chunks, wire::to_columns(holder.tails),
                                static_cast<std::uint32_t>(holder.tier), holder.confirmed});
    }
    reply(peer, answer);
  }

  void on(const std::string& peer, const wire::Leave& leave, TimeNs) {
    const Session* session = session_of(peer, leave.incarnation);
    if (session == nullptr) return;
    const NodeId node = session->node;
    log().info("node {} left", peers_.at(node).name);
    directory_.leave(node);
    end_session(node);
  }

  void on(const std::string& peer, const wire::StatusRequest&, TimeNs now) {
    wire::StatusReply answer;
    counters_.chunks_dropped = directory_.num_chunks_dropped();
    counters_.digests_differed = directory_.num_digests_differed();
    answer.status = {KVFERRY_VERSION, static_cast<std::uint64_t>((now - started_at_) / kMillisecond), counters_,
                     directory_.status(now)};
    reply(peer, answer);
  }

  /// What only a controller sends.
  template <class T>
  void on(const std::string&, const T&, TimeNs) {
    count_malformed("a controller's own kind of message");
  }

  void expire(TimeNs now) {
    for (const NodeId node : directory_.expire(now)) {
      ++counters_.nodes_expired;
      log().warn("node {} was silent for too long and is forgotten", peers_.at(node).name);
      end_session(node);
    }
  }

  /// nullptr: the sender has to say Hello first. Valid until sessions change.
  const Session* session_of(const std::string& peer, std::uint64_t incarnation) {
    const auto it = sessions_.find(peer);
    if (it != sessions_.end() && it->second.incarnation.value == incarnation) return &it->second;
    ++counters_.messages_unregistered;
    return nullptr;
  }

  void end_session(NodeId node) {
    const auto it = peers_.find(node);
    if (it == peers_.end()) return;
    sessions_.erase(it->second.routing_id);
    peers_.erase(it);
  }

  void send_unregistered(const std::string& peer, std::uint64_t incarnation) {
    reply(peer, wire::Unregistered{.incarnation = incarnation});
  }

  void want_repair(const std::string& peer, const Session& session) {
    const Repair repair = directory_.repair(session.node);
    ++(repair.resend_will_do ? counters_.resends_wanted : counters_.snapshots_wanted);
    reply(peer, wire::SnapshotWanted{.incarnation = session.incarnation.value,
                                     .next_sequence = repair.heard_below,
                                     .resend_will_do = repair.resend_will_do,
                                     .resend_from = repair.resend_from});
  }

  void count_malformed(std::string_view story) {
    // A flood must not fill the disk: the 1st, 2nd, 4th, 8th ... is told.
    if (std::has_single_bit(++counters_.messages_malformed))
      log().warn("dropped a message ({} so far): {}", counters_.messages_malformed, story);
  }

  template <class T>
  void reply(const std::string& peer, const T& message) {
    if (!try_send(router_, peer, zmq::send_flags::sndmore) || !try_send(router_, encode(message)))
      ++counters_.replies_dropped;
  }

  const Clock& clock_;
  Directory directory_;
  TimeNs started_at_;
  Counters counters_;
  std::unordered_map<std::string, Session> sessions_;  // by routing id
  std::unordered_map<NodeId, Peer> peers_;
  std::atomic<bool> stopping_{false};
  WakeUp wake_up_;
  std::string endpoint_;
  zmq::context_t context_{1};
  zmq::socket_t router_{context_, zmq::socket_type::router};
};

}  // namespace

Result<std::unique_ptr<Server>> Server::bind(const ServerOptions& options, const Clock& clock) {
  if (Result<void> checked = check_endpoint(options.bind, EndpointUse::kBind); !checked)
    return std::move(checked).error();
  auto server = std::make_unique<ZmqServer>(options, clock);
  if (Result<void> listening = server->listen(options.bind); !listening) return std::move(listening).error();
  return std::unique_ptr<Server>(std::move(server));
}

}  // namespace kvferry::controller
