#include "controller/server/stream_listener.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <unordered_map>
#include <vector>

#include "controller/server/stream_connection.h"

namespace kvferry::controller {
namespace {

constexpr std::size_t kReadBytesMax = std::size_t{64} << 10;  // a connection and turn
constexpr std::size_t kMessagesPerTurnMax = 1024;             // so that a flood can't put off the leases
constexpr std::size_t kAcceptedPerTurnMax = 64;
constexpr std::size_t kConnectionsMin = 64;
constexpr std::size_t kConnectionsMax = 8192;
constexpr TimeNs kLastWordTime = kSecond;

std::size_t connections_max() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return std::clamp<std::size_t>(limit.rlim_cur / 2, kConnectionsMin, kConnectionsMax);
}

class StreamSocketListener final : public StreamListener, private ReplySender {
 public:
  explicit StreamSocketListener(Sessions& sessions) : sessions_(sessions) {}
  ~StreamSocketListener() override {
    if (!path_.empty()) ::unlink(path_.c_str());
  }

  Result<void> listen(const StreamAddress& address) {
    Result<BoundSocket> listener = listen_on(address);
    if (!listener) return std::move(listener).error();
    listener_ = std::move(*listener);
    path_ = address.path;
    return watch(EPOLL_CTL_ADD, listener_.socket.get(), EPOLLIN, nullptr)
               ? Result<void>{}
               : Error{ErrorCode::kUnavailable, "no file descriptor left to listen with"};
  }

  const std::string& endpoint() const override { return listener_.endpoint; }
  int fd() const override { return epoll_.get(); }

  bool take(TimeNs now) override {
    std::array<epoll_event, 64> events;
    const int num_events = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
    bool more_waits = num_events == static_cast<int>(events.size());
    num_taken_ = 0;
    for (int i = 0; i < num_events; ++i) {
      // What is left is readable still, and epoll hands out what it has not handed out for longest.
      if (num_taken_ >= kMessagesPerTurnMax) {
        more_waits = true;
        break;
      }
      if (events[i].data.ptr == nullptr)
        accept(now);
      else
        more_waits |= turn(*static_cast<StreamConnection*>(events[i].data.ptr), now);
    }
    end_those_that_are_over(now);
    return more_waits;
  }

 private:
  bool turn(StreamConnection& connection, TimeNs now) {
    std::optional<std::uint32_t> num_claimed;
    const auto take = [&](std::string_view message) {
      ++num_taken_;
      sessions_.take(connection.id(), message, now, *this);
    };
    current_ = &connection;
    const StreamConnection::Received received = connection.receive(scratch_, now, take, num_claimed);
    current_ = nullptr;
    if (received == StreamConnection::Received::kEnded) return over_.push_back(connection.id()), false;
    if (num_claimed) refuse(connection, *num_claimed, now);
    flush(connection);
    return received == StreamConnection::Received::kMore;
  }

  void refuse(StreamConnection& connection, std::uint32_t num_claimed, TimeNs now) {
    const std::string story =
        fmt::format("a message of {} bytes; at most {} are allowed", num_claimed, wire::kMessageBytesMax);
    sessions_.count_malformed(story);
    connection.send(encode(wire::Refused{.reason = story}));
    connection.end(now + kLastWordTime);
    ending_.push_back(connection.id());
  }

  bool send(ConnectionId to, std::string_view bytes) override {
    StreamConnection* connection = current_ != nullptr && current_->id() == to ? current_ : find(to);
    if (connection == nullptr || !connection->send(bytes)) return false;
    if (connection != current_) flush(*connection);
    return true;
  }

  void flush(StreamConnection& connection) {
    if (!connection.flush()) return over_.push_back(connection.id());
    if (connection.has_unsent() == connection.waits_for_room) return;
    connection.waits_for_room = connection.has_unsent();
    watch(EPOLL_CTL_MOD, connection.fd(), connection.waits_for_room ? EPOLLIN | EPOLLOUT : EPOLLIN, &connection);
  }

  void accept(TimeNs now) {
    for (std::size_t i = 0; i < kAcceptedPerTurnMax; ++i) {
      OwnedFd socket = accept_from(listener_.socket.get());
      if (!socket && (errno == EMFILE || errno == ENFILE) && spare_) {
        // Somebody who waits for ever would keep the loop awake for ever.
        spare_ = OwnedFd();
        OwnedFd(::accept(listener_.socket.get(), nullptr, nullptr));  // and closes it
        spare_ = OwnedFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
        continue;
      }
      if (!socket) return;
      if (connections_.size() >= connections_max_ && !make_room()) continue;
      const ConnectionId id = sessions_.open();
      auto connection = std::make_unique<StreamConnection>(id, std::move(socket), now);
      if (watch(EPOLL_CTL_ADD, connection->fd(), EPOLLIN, connection.get()))
        connections_.emplace(id, std::move(connection));
    }
  }

  /// False: each of them speaks for a node.
  bool make_room() {
    StreamConnection* silent = nullptr;
    for (const auto& [id, connection] : connections_) {
      if (connection->is_given_up || sessions_.session(id) != nullptr) continue;
      if (silent == nullptr || connection->heard_at() < silent->heard_at()) silent = connection.get();
    }
    if (silent == nullptr) return false;
    silent->is_given_up = true;  // only then: its event may be among those in hand
    over_.push_back(silent->id());
    return true;
  }

  void end_those_that_are_over(TimeNs now) {
    std::erase_if(ending_, [&](ConnectionId id) {
      const StreamConnection* connection = find(id);
      if (connection != nullptr && !connection->is_over(now)) return false;
      if (connection != nullptr) over_.push_back(id);
      return true;
    });
    for (const ConnectionId id : over_) {
      if (connections_.erase(id) > 0) sessions_.disconnected(id);
    }
    over_.clear();
  }

  StreamConnection* find(ConnectionId id) const {
    const auto found = connections_.find(id);
    return found == connections_.end() ? nullptr : found->second.get();
  }

  bool watch(int how, int fd, std::uint32_t events, void* whom) {
    epoll_event event{.events = events, .data = {.ptr = whom}};
    return ::epoll_ctl(epoll_.get(), how, fd, &event) == 0;
  }

  Sessions& sessions_;
  const std::size_t connections_max_ = connections_max();
  BoundSocket listener_;
  std::string path_;  // of a Unix socket
  OwnedFd epoll_{::epoll_create1(EPOLL_CLOEXEC)};
  OwnedFd spare_{::open("/dev/null", O_RDONLY | O_CLOEXEC)};
  std::unordered_map<ConnectionId, std::unique_ptr<StreamConnection>> connections_;
  std::vector<ConnectionId> ending_;  // after a last word
  std::vector<ConnectionId> over_;    // by the end of this turn
  std::string scratch_ = std::string(kReadBytesMax, '\0');
  StreamConnection* current_ = nullptr;  // whose messages are being taken
  std::size_t num_taken_ = 0;
};

}  // namespace

Result<std::unique_ptr<StreamListener>> StreamListener::bind(const std::string& endpoint, Sessions& sessions) {
  if (Result<void> checked = check_endpoint(endpoint, EndpointUse::kBindStream); !checked)
    return std::move(checked).error();
  auto front = std::make_unique<StreamSocketListener>(sessions);
  if (Result<void> listening = front->listen(stream_address(endpoint)); !listening) return std::move(listening).error();
  return std::unique_ptr<StreamListener>(std::move(front));
}

}  // namespace kvferry::controller
