#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <deque>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "controller/protocol/stream_socket.h"
#include "controller/protocol/wire.h"
#include "controller/server/node_listeners.h"
#include "controller/server/turn_budget.h"
#include "transport/base/net/spare_fd.h"
#include "transport/base/net/tcp_socket.h"

namespace kvferry::controller {
namespace {

constexpr std::size_t kReadBytesMax = std::size_t{64} << 10;  // limit on the bytes that a connection's share reads
constexpr std::size_t kAcceptedPerTurnMax = 64;
constexpr std::size_t kConnectionsMin = 64;
constexpr std::size_t kConnectionsMax = 8192;
// Limit on a peer's unsent replies, which a single longer reply may exceed: twice kMessageBytesMax.
constexpr std::size_t kUnsentRepliesBytesMax = std::size_t{8} << 20;
constexpr TimeNs kRefusalTime = kSecond;  // time for a peer to read why its connection was refused

std::size_t connections_max() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return std::clamp<std::size_t>(limit.rlim_cur / 2, kConnectionsMin, kConnectionsMax);
}

struct StreamConnection {
  ConnectionId id;
  OwnedFd socket;
  TimeNs heard_at;
  std::string in{};  // received bytes of messages that wait for this connection's next share or are incomplete
  std::size_t num_handled = 0;  // number of bytes at the start of `in` whose messages were handled
  bool is_queued = false;       // whether queue_ contains this connection
  UnsentMessages out{kUnsentRepliesBytesMax};
  bool waits_for_room = false;  // `out` has unsent replies; epoll reports when the socket is writable
  // Set if this connection is closed at the end of the turn, to make room for a new connection.
  bool is_given_up = false;
  /// Set if the connection was refused: its input is read and ignored until this time or until the peer closes the
  /// connection, because closing a socket with unread input would discard the output.
  std::optional<TimeNs> ends_at{};

  std::string_view unhandled() const { return std::string_view(in).substr(num_handled); }
  /// Returns true if `in` has a whole message to handle, or a length to refuse.
  bool has_message() const {
    const std::string_view rest = unhandled();
    if (rest.size() < kLengthBytes) return false;
    const std::uint32_t length = frame_length(rest);
    return length > wire::kMessageBytesMax || rest.size() - kLengthBytes >= length;
  }
  /// Removes the handled bytes.
  void tidy() {
    if (num_handled < in.size()) {
      in.erase(0, num_handled);
    } else if (in.capacity() > kReadBytesMax) {
      std::string().swap(in);  // this frees the memory of a large message, which clear() would keep
    } else {
      in.clear();
    }
    num_handled = 0;
  }
};

class StreamListener final : public BoundListener, private ReplySender {
 public:
  StreamListener(Sessions& sessions, const Clock& clock) : sessions_(sessions), budget_(clock) {}
  ~StreamListener() override {
    if (!path_.empty()) ::unlink(path_.c_str());
  }

  Result<void> listen(const StreamAddress& address) {
    listener_ = KVFERRY_TRY(listen_on(address));
    path_ = address.path;
    return watch(EPOLL_CTL_ADD, listener_.socket.get(), EPOLLIN, nullptr)
               ? Result<void>{}
               : Error{ErrorCode::kUnavailable,
                       "no file descriptor is left for the stream listener; raise the limit (ulimit -n)"};
  }

  const std::string& address() const override { return listener_.endpoint; }
  int fd() const override { return epoll_.get(); }

  /// Gives each connection with input a share in turn, until no input is left or the turn is over. So a connection that
  /// always has more input delays each other one by one share.
  bool serve(TimeNs now) override {
    budget_.begin_turn();
    std::array<epoll_event, 64> events;
    const int num_events = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
    for (int i = 0; i < num_events; ++i) {
      if (events[i].data.ptr == nullptr)
        accept(now);
      else
        enqueue(*static_cast<StreamConnection*>(events[i].data.ptr));
    }
    while (!queue_.empty() && !budget_.is_turn_over()) {
      StreamConnection* connection = find(queue_.front());
      queue_.pop_front();
      if (connection == nullptr) continue;
      connection->is_queued = false;
      if (!serve_one(*connection, now)) continue;
      if (!queue_.empty() && budget_.is_share_over()) sessions_.count_delayed(connection->id, budget_.share_used());
      enqueue(*connection);
    }
    close_finished(now);
    return !queue_.empty() || num_events == static_cast<int>(events.size());
  }

 private:
  void enqueue(StreamConnection& connection) {
    if (!std::exchange(connection.is_queued, true)) queue_.push_back(connection.id);
  }

  /// Receives from a connection, up to its share, and sends to it. Returns true if more input may wait.
  bool serve_one(StreamConnection& connection, TimeNs now) {
    budget_.begin_share();
    bool may_have_more = true;
    if (connection.has_message()) {
      current_ = &connection;
      connection.num_handled += handle(connection, connection.unhandled(), now);
    } else {
      const long num_read = read_some(connection.socket.get(), scratch_);
      if (num_read == 0) return over_.push_back(connection.id), false;
      may_have_more = num_read == static_cast<long>(scratch_.size());
      if (num_read > 0 && !connection.ends_at) {
        connection.heard_at = now;
        current_ = &connection;
        receive(connection, std::string_view(scratch_).substr(0, static_cast<std::size_t>(num_read)), now);
      }
    }
    current_ = nullptr;
    if (connection.unhandled().empty()) connection.tidy();
    flush(connection);
    return may_have_more || connection.has_message();
  }

  void receive(StreamConnection& connection, std::string_view bytes, TimeNs now) {
    budget_.count(0, bytes.size());
    connection.tidy();
    if (connection.in.empty()) {  // the messages are handled where they are; only what is left of them is copied
      bytes.remove_prefix(handle(connection, bytes, now));
      connection.in.assign(bytes);
    } else {
      connection.in.append(bytes);
      connection.num_handled = handle(connection, connection.in, now);
    }
  }

  /// Handles the messages at the start of `bytes`, up to the connection's share. Returns the number of handled bytes.
  std::size_t handle(StreamConnection& connection, std::string_view bytes, TimeNs now) {
    std::string_view rest = bytes;
    while (rest.size() >= kLengthBytes && !budget_.is_share_over() && !budget_.is_turn_over()) {
      const std::uint32_t length = frame_length(rest);
      if (length > wire::kMessageBytesMax) return refuse(connection, length, now), bytes.size();
      if (rest.size() - kLengthBytes < length) break;
      sessions_.receive(connection.id, rest.substr(kLengthBytes, length), now, *this);
      budget_.count(1, 0);
      rest.remove_prefix(kLengthBytes + length);
    }
    return bytes.size() - rest.size();
  }

  /// Ends a connection whose peer announced too long a message, because no later message can be read.
  void refuse(StreamConnection& connection, std::uint32_t num_claimed, TimeNs now) {
    const std::string reason =
        fmt::format("the message has {} bytes; at most {} are allowed", num_claimed, wire::kMessageBytesMax);
    sessions_.count_malformed(reason);
    connection.out.add(encode(wire::Refused{.reason = reason}));
    connection.out.write_to(connection.socket.get());
    connection.ends_at = now + kRefusalTime;
    ::shutdown(connection.socket.get(), SHUT_WR);
    ending_.push_back(connection.id);
  }

  bool send(ConnectionId to, std::string_view bytes) override {
    StreamConnection* connection = current_ != nullptr && current_->id == to ? current_ : find(to);
    if (connection == nullptr || connection->ends_at || !connection->out.add(bytes)) return false;
    if (connection != current_) flush(*connection);
    return true;
  }

  void flush(StreamConnection& connection) {
    // A peer that has gone may have left messages, such as its Leave, so only the end of its input ends the connection.
    if (!connection.out.write_to(connection.socket.get())) connection.out.clear();
    if (connection.out.empty() != connection.waits_for_room) return;
    connection.waits_for_room = !connection.waits_for_room;
    watch(EPOLL_CTL_MOD, connection.socket.get(), connection.waits_for_room ? EPOLLIN | EPOLLOUT : EPOLLIN,
          &connection);
  }

  void accept(TimeNs now) {
    for (std::size_t i = 0; i < kAcceptedPerTurnMax; ++i) {
      OwnedFd socket = net::accept_tcp(listener_.socket.get());
      if (!socket && spare_.refuse(listener_.socket.get(), "stream")) continue;
      if (!socket) return;
      if (connections_.size() >= connections_max_ && !make_room()) continue;
      const ConnectionId id = sessions_.open();
      std::unique_ptr<StreamConnection> connection(new StreamConnection{id, std::move(socket), now});
      if (watch(EPOLL_CTL_ADD, connection->socket.get(), EPOLLIN, connection.get()))
        connections_.emplace(id, std::move(connection));
    }
  }

  /// Gives up the connection that has been silent longest among the connections without a registered node. Returns
  /// false if there is no such connection.
  bool make_room() {
    StreamConnection* silent = nullptr;
    for (const auto& [id, connection] : connections_) {
      if (connection->is_given_up || sessions_.session(id) != nullptr) continue;
      if (silent == nullptr || connection->heard_at < silent->heard_at) silent = connection.get();
    }
    if (silent == nullptr) return false;
    // The connection is closed only at the end of the turn, because one of the current events may refer to it.
    silent->is_given_up = true;
    over_.push_back(silent->id);
    return true;
  }

  void close_finished(TimeNs now) {
    std::erase_if(ending_, [&](ConnectionId id) {
      const StreamConnection* connection = find(id);
      if (connection != nullptr && now < connection->ends_at) return false;
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

  bool watch(int how, int fd, std::uint32_t events, StreamConnection* connection) {
    epoll_event event{.events = events, .data = {.ptr = connection}};
    return ::epoll_ctl(epoll_.get(), how, fd, &event) == 0;
  }

  Sessions& sessions_;
  const std::size_t connections_max_ = connections_max();
  BoundSocket listener_;
  std::string path_;  // path of the Unix socket that this process listens on
  OwnedFd epoll_{::epoll_create1(EPOLL_CLOEXEC)};
  net::SpareFd spare_;
  std::unordered_map<ConnectionId, std::unique_ptr<StreamConnection>> connections_;
  std::vector<ConnectionId> ending_;  // refused connections that are still open, see StreamConnection::ends_at
  std::vector<ConnectionId> over_;    // connections to close at the end of this turn
  std::string scratch_ = std::string(kReadBytesMax, '\0');
  StreamConnection* current_ = nullptr;  // the connection whose messages are being received
  TurnBudget budget_;
  std::deque<ConnectionId> queue_;  // connections that have or may have input, in the order of their next shares
};

}  // namespace

Result<std::unique_ptr<BoundListener>> listen_stream(const std::string& endpoint, Sessions& sessions,
                                                     const Clock& clock) {
  KVFERRY_TRY(check_endpoint(endpoint, EndpointUse::kBindStream));
  auto listener = std::make_unique<StreamListener>(sessions, clock);
  KVFERRY_TRY(listener->listen(stream_address(endpoint)));
  return std::unique_ptr<BoundListener>(std::move(listener));
}

}  // namespace kvferry::controller
