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

constexpr int kMessagesPerTurnMax = 1024;  // so that a flood can't put off the leases
constexpr int kReceiveQueueMax = 32;       // messages a peer; times kMessageBytesMax bounds what it can pile up
constexpr int kSendQueueMax = 256;         // replies a peer
constexpr int kBacklog = 4096;             // that come at once, as after a restart; who finds it full waits a second
constexpr std::size_t kConnectionsKeptMin = 1024;

/// Routing ids of the connections that were heard of, numbered. A ROUTER doesn't tell when one ends, so those without a
/// session are given up when there are too many of them; one that speaks again then counts as new.
class Connections {
 public:
  explicit Connections(Sessions& sessions) : sessions_(sessions) {}

  ConnectionId of(const std::string& routing_id) {
    const auto known = ids_.find(routing_id);
    if (known != ids_.end()) return known->second;
    if (ids_.size() >= std::max(kConnectionsKeptMin, 4 * sessions_.num_sessions())) drop_strangers();
    const ConnectionId id = sessions_.open();
    routing_ids_.emplace(id, routing_id);
    ids_.emplace(routing_id, id);
    return id;
  }
  /// nullptr: given up.
  const std::string* routing_id(ConnectionId id) const {
    const auto known = routing_ids_.find(id);
    return known == routing_ids_.end() ? nullptr : &known->second;
  }

 private:
  void drop_strangers() {
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
    // ZeroMQ listens on addresses and interfaces, not on names; this is the one name with a meaning that can't move.
    constexpr std::string_view kLocalhost = "tcp://localhost:";
    if (bind.starts_with(kLocalhost)) bind.replace(0, kLocalhost.size(), "tcp://127.0.0.1:");
    try {
      set_common_options(router_, bind);
      router_.set(zmq::sockopt::router_mandatory, true);  // a reply to nobody is counted, not lost in silence
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
                   fmt::format("can't listen on {}: {}{}", bind, failure.what(),
                               not_ours ? "; HOST must be *, or an address or interface of this machine" : "")};
    }
  }

  const std::string& endpoint() const override { return endpoint_; }
  int fd() const override { return epoll_.get(); }

  bool take(TimeNs now) override {
    if (std::exchange(is_woken_, false)) wake_up_.clear();
    // The last thing done to the socket is a receive that finds nothing: that one arms ZeroMQ's descriptor again.
    is_taking_ = true;
    int num_taken = 0;
    while (num_taken < kMessagesPerTurnMax && take_one(now)) ++num_taken;
    is_taking_ = false;
    return num_taken == kMessagesPerTurnMax;
  }

 private:
  bool take_one(TimeNs now) {
    zmq::message_t frames[2];  // routing id, payload
    const std::size_t num_frames = try_receive(router_, frames, std::size(frames));
    if (num_frames == 0) return false;
    if (num_frames != std::size(frames)) {
      sessions_.count_malformed(fmt::format("{} frames instead of one", num_frames - 1));
      return true;
    }
    sessions_.take(connections_.of(frames[0].to_string()), frames[1].to_string_view(), now, *this);
    return true;
  }

  bool send(ConnectionId to, std::string_view bytes) override {
    const std::string* routing_id = connections_.routing_id(to);
    const bool sent =
        routing_id != nullptr && try_send(router_, *routing_id, zmq::send_flags::sndmore) && try_send(router_, bytes);
    // Sending may swallow the edge that tells of a waiting message; outside of take() nobody would look.
    if (!is_taking_ && !std::exchange(is_woken_, true)) wake_up_.raise();
    return sent;
  }

  bool watch(int fd) {
    epoll_event event{.events = EPOLLIN, .data = {}};
    return ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
  }

  Sessions& sessions_;
  Connections connections_;
  std::string endpoint_;
  bool is_taking_ = false;
  bool is_woken_ = false;
  WakeUp wake_up_;
  OwnedFd epoll_{::epoll_create1(EPOLL_CLOEXEC)};
  zmq::context_t context_{1};
  zmq::socket_t router_{context_, zmq::socket_type::router};
};

}  // namespace

Result<std::unique_ptr<ZmqListener>> ZmqListener::bind(const std::string& endpoint, Sessions& sessions) {
  if (Result<void> checked = check_endpoint(endpoint, EndpointUse::kBind); !checked) return std::move(checked).error();
  auto front = std::make_unique<RouterListener>(sessions);
  if (Result<void> listening = front->listen(endpoint); !listening) return std::move(listening).error();
  return std::unique_ptr<ZmqListener>(std::move(front));
}

}  // namespace kvferry::controller
