#include <algorithm>
#include <array>
#include <unordered_map>
#include <utility>

#include "controller/api/endpoint.h"
#include "controller/protocol/wire.h"
#include "controller/server/member_shares.h"
#include "controller/server/node_listeners.h"
#include "controller/server/turn_budget.h"
#include "transport/base/net/zmq_socket.h"

namespace kvferry::controller {
namespace {

constexpr int kReceiveQueueMax = 32;  // limit on a peer's waiting messages, each of up to kMessageBytesMax
constexpr int kReplyQueueMax = 256;   // limit on waiting replies to a peer
constexpr std::size_t kConnectionsKeptMin = 1024;

/// Maps ZeroMQ's routing ids to connection ids. A ROUTER socket does not report closed connections, so connections
/// without a session are dropped when there are too many; a dropped connection that sends again gets a new id.
class Connections {
 public:
  explicit Connections(Sessions& sessions) : sessions_(sessions) {}

  ConnectionId id_of(const std::string& routing_id) {
    const auto known = ids_.find(routing_id);
    if (known != ids_.end()) return known->second;
    if (ids_.size() >= std::max(kConnectionsKeptMin, 4 * sessions_.num_sessions())) drop_unregistered();
    const ConnectionId id = sessions_.open();
    routing_ids_.emplace(id, routing_id);
    ids_.emplace(routing_id, id);
    return id;
  }
  /// Returns nullptr for a dropped connection.
  const std::string* routing_id(ConnectionId id) const {
    const auto known = routing_ids_.find(id);
    return known == routing_ids_.end() ? nullptr : &known->second;
  }

 private:
  void drop_unregistered() {
    std::erase_if(ids_, [&](const auto& entry) { return sessions_.session(entry.second) == nullptr; });
    std::erase_if(routing_ids_, [&](const auto& entry) { return sessions_.session(entry.first) == nullptr; });
  }

  Sessions& sessions_;
  std::unordered_map<std::string, ConnectionId> ids_;
  std::unordered_map<ConnectionId, std::string> routing_ids_;
};

class ZmqListener final : public BoundListener, private ReplySender {
 public:
  ZmqListener(Sessions& sessions, const Clock& clock) : sessions_(sessions), connections_(sessions), budget_(clock) {}

  Result<void> listen(const std::string& bind, const std::optional<net::ClusterKey>& key) {
    auto context = std::make_shared<net::ZmqContext>(net::ZmqContext::kSocketsMaxDefault, key);
    router_ = KVFERRY_TRY(net::ZmqSocket::make(std::move(context), net::ZmqKind::kRouter,
                                               {.message_bytes_max = wire::kMessageBytesMax,
                                                .receive_queue_max = kReceiveQueueMax,
                                                .send_queue_max = kReplyQueueMax}));
    has_key_ = key.has_value();
    return router_->bind(bind);
  }

  const std::string& address() const override { return router_->endpoint(); }
  int fd() const override { return router_->fd(); }

  /// The socket takes one message of each connection in turn, so a flooding one delays each message of another one by
  /// one message. A member with many connections has one share of the time for all of them.
  bool serve(TimeNs now) override {
    for (; num_counted_ < router_->num_handshakes_failed(); ++num_counted_)
      if (has_key_) sessions_.count_refused_handshake();
    for (budget_.begin_turn(); !budget_.is_turn_over();) {
      if (!receive_one(now)) return messages_wait_ = false;
    }
    return messages_wait_ = true;
  }

 private:
  bool receive_one(TimeNs now) {
    net::ZmqPart parts[2];  // the routing id and the payload
    const std::size_t num_parts = router_->receive(parts);
    if (num_parts == 0) return false;
    const TimeNs begun_at = budget_.now();
    const net::Identity sender = router_->sender_of(parts);
    handle(parts, num_parts, now, sender);
    budget_.count(1, parts[1].bytes().size());
    if (!sender.name.empty()) shares_.add(sender.name, budget_.now() - begun_at, budget_.now());
    return true;
  }

  void handle(net::ZmqPart (&parts)[2], std::size_t num_parts, TimeNs now, const net::Identity& sender) {
    if (num_parts != std::size(parts))
      return sessions_.count_malformed(
          fmt::format("the ZeroMQ message has {} parts; exactly one is allowed", num_parts - 1));
    const ConnectionId from = connections_.id_of(std::string(parts[0].bytes()));
    if (sender.role == net::Role::kNone) return sessions_.revoke(from, now);
    const bool is_over_share = messages_wait_ && shares_.is_used_up(sender.name, budget_.now());
    if (is_over_share)
      sessions_.count_delayed(
          from, fmt::format("{} ms of {} ms", kMemberTimeMax / kMillisecond, kMemberWindow / kMillisecond));
    sessions_.receive(from, parts[1].bytes(), now, *this, sender, is_over_share);
  }

  bool send(ConnectionId to, std::string_view bytes) override {
    const std::string* routing_id = connections_.routing_id(to);
    return routing_id != nullptr && router_->send(std::array<std::string_view, 2>{*routing_id, bytes});
  }

  Sessions& sessions_;
  Connections connections_;
  std::unique_ptr<net::ZmqSocket> router_;
  TurnBudget budget_;
  MemberShares shares_;
  bool messages_wait_ = false;  // whether the last turn left messages
  bool has_key_ = false;
  std::uint64_t num_counted_ = 0;  // failed handshakes that were counted
};

}  // namespace

Result<std::unique_ptr<BoundListener>> listen_zmq(const std::string& endpoint, Sessions& sessions, const Clock& clock,
                                                  const std::optional<net::ClusterKey>& key) {
  KVFERRY_TRY(check_endpoint(endpoint, EndpointUse::kBind));
  auto listener = std::make_unique<ZmqListener>(sessions, clock);
  KVFERRY_TRY(listener->listen(endpoint, key));
  return std::unique_ptr<BoundListener>(std::move(listener));
}

}  // namespace kvferry::controller
