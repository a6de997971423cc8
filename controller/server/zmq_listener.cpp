#include "controller/server/zmq_listener.h"

#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "controller/api/endpoint.h"
#include "controller/protocol/wake_up.h"
#include "controller/protocol/zmq_io.h"
#include "transport/base/owned_fd.h"

namespace kvferry::controller {
namespace {

constexpr int kMessagesPerTurnMax = 1024;  // so that a flood does not delay lease checks
constexpr int kReceiveQueueMax = 32;       // messages of a peer; times kMessageBytesMax bounds its memory
constexpr int kSendQueueMax = 256;         // replies to a peer
constexpr int kBacklog = 4096;             // simultaneous connects, as after a restart; beyond it a peer waits a second
constexpr std::size_t kConnectionsKeptMin = 1024;

/// Maps routing ids to connection ids. A ROUTER does not report closed connections, so connections without a session
/// are dropped when there are too many; a dropped one that sends again gets a new id.
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

class RouterListener final : public ZmqListener, private ReplySender {
 public:
  explicit RouterListener(Sessions& sessions) : sessions_(sessions), connections_(sessions) {}

  Result<void> listen(std::string bind) {
    // ZeroMQ listens on addresses and interfaces, not on host names; localhost is the one name with a fixed meaning.
    constexpr std::string_view kLocalhost = "tcp://localhost:";
    if (bind.starts_with(kLocalhost)) bind.replace(0, kLocalhost.size(), "tcp://127.0.0.1:");
    try {
      set_common_options(router_, bind);
      router_.set(zmq::sockopt::router_mandatory,
                  true);  // a reply to a closed connection is an error, which is counted
      router_.set(zmq::sockopt::rcvhwm, kReceiveQueueMax);
      router_.set(zmq::sockopt::sndhwm, kSendQueueMax);
      router_.set(zmq::sockopt::backlog, kBacklog);
      router_.bind(bind);
      endpoint_ = router_.get(zmq::sockopt::last_endpoint);
      return watch(router_.get(zmq::sockopt::fd)) && watch(wake_up_.fd())
                 ? Result<void>{}
                 : Error{ErrorCode::kUnavailable, "no file descriptor left to listen with"};
    } catch (const zmq::error_t& failure) {
      const bool not_ours = failure.num() == ENODEV || failure.num() == EADDRNOTAVAIL;
      return Error{ErrorCode::kUnavailable,
                   fmt::format("cannot listen on {}: {}{}", bind, failure.what(),
                               not_ours ? "; HOST must be *, or an address or interface of this machine" : "")};
    }
  }

  const std::string& endpoint() const override { return endpoint_; }
  int fd() const override { return epoll_.get(); }

  bool serve(TimeNs now) override {
    if (std::exchange(is_woken_, false)) wake_up_.clear();
    // The loop ends with a receive that finds nothing, which arms ZeroMQ's edge-triggered descriptor again.
    is_serving_ = true;
    int num_received = 0;
    while (num_received < kMessagesPerTurnMax && receive_one(now)) ++num_received;
    is_serving_ = false;
    return num_received == kMessagesPerTurnMax;
  }

 private:
  bool receive_one(TimeNs now) {
    zmq::message_t parts[2];  // routing id, payload
    const std::size_t num_parts = try_receive(router_, parts, std::size(parts));
    if (num_parts == 0) return false;
    if (num_parts != std::size(parts)) {
      sessions_.count_malformed(fmt::format("{} message parts instead of one", num_parts - 1));
      return true;
    }
    sessions_.receive(connections_.id_of(parts[0].to_string()), parts[1].to_string_view(), now, *this);
    return true;
  }

  bool send(ConnectionId to, std::string_view bytes) override {
    const std::string* routing_id = connections_.routing_id(to);
    const bool sent =
        routing_id != nullptr && try_send(router_, *routing_id, zmq::send_flags::sndmore) && try_send(router_, bytes);
    // Sending may consume the edge that signals a waiting message; inside serve() the receive loop finds it anyway.
    if (!is_serving_ && !std::exchange(is_woken_, true)) wake_up_.raise();
    return sent;
  }

  bool watch(int fd) {
    epoll_event event{.events = EPOLLIN, .data = {}};
    return ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
  }

  Sessions& sessions_;
  Connections connections_;
  std::string endpoint_;
  bool is_serving_ = false;
  bool is_woken_ = false;
  WakeUp wake_up_;
  OwnedFd epoll_{::epoll_create1(EPOLL_CLOEXEC)};
  zmq::context_t context_{1};
  zmq::socket_t router_{context_, zmq::socket_type::router};
};

}  // namespace

Result<std::unique_ptr<ZmqListener>> ZmqListener::bind(const std::string& endpoint, Sessions& sessions) {
  if (Result<void> checked = check_endpoint(endpoint, EndpointUse::kBind); !checked) return std::move(checked).error();
  auto listener = std::make_unique<RouterListener>(sessions);
  if (Result<void> listening = listener->listen(endpoint); !listening) return std::move(listening).error();
  return std::unique_ptr<ZmqListener>(std::move(listener));
}

}  // namespace kvferry::controller
