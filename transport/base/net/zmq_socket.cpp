#include "transport/base/net/zmq_socket.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <zmq.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/base/net/tcp_socket.h"

namespace kvferry::net {
namespace {

static_assert(sizeof(zmq_msg_t) == 64);

constexpr int kRefusals =
    ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL | ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | ZMQ_EVENT_HANDSHAKE_FAILED_AUTH;

zmq_msg_t* message(std::byte* storage) { return reinterpret_cast<zmq_msg_t*>(storage); }

std::string last_error() { return ::zmq_strerror(::zmq_errno()); }

template <class Value>
bool set(void* socket, int option, Value value) {
  return ::zmq_setsockopt(socket, option, &value, sizeof(value)) == 0;
}

template <class Value>
Value get(void* socket, int option) {
  Value value{};
  std::size_t bytes = sizeof(value);
  ::zmq_getsockopt(socket, option, &value, &bytes);
  return value;
}

int type_of(ZmqKind kind) {
  return kind == ZmqKind::kRouter ? ZMQ_ROUTER : kind == ZmqKind::kDealer ? ZMQ_DEALER : ZMQ_SUB;
}

/// Returns true for tcp://NAME:PORT, where the family of the address is unknown.
bool has_host_name(const std::string& endpoint) {
  const std::optional<HostPort> address = address_of_endpoint(endpoint);
  return address && !is_numeric(address->host);
}

}  // namespace

ZmqPart::ZmqPart() { ::zmq_msg_init(message(message_)); }
ZmqPart::~ZmqPart() { ::zmq_msg_close(message(message_)); }

std::string_view ZmqPart::bytes() const {
  return {static_cast<const char*>(::zmq_msg_data(message(message_))), ::zmq_msg_size(message(message_))};
}

ZmqSocket::ZmqSocket(std::shared_ptr<ZmqContext> context, int type)
    : context_(std::move(context)), handle_(::zmq_socket(context_->handle(), type)) {}

ZmqSocket::~ZmqSocket() {
  if (handle_ == nullptr) return;
  connections_.reset();
  // Monitoring ends before the monitor closes, because ZeroMQ's thread would wait forever to send an event to a closed
  // monitor.
  if (monitored_ != nullptr) ::zmq_socket_monitor(monitored_, nullptr, 0);
  ::zmq_close(handle_);
}

Result<std::unique_ptr<ZmqSocket>> ZmqSocket::make(std::shared_ptr<ZmqContext> context, ZmqKind kind,
                                                   ZmqOptions options) {
  std::unique_ptr<ZmqSocket> socket(new ZmqSocket(std::move(context), type_of(kind)));
  KVFERRY_TRY(socket->set_up(kind, options));
  return socket;
}

Result<void> ZmqSocket::set_up(ZmqKind kind, const ZmqOptions& options) {
  if (handle_ == nullptr) return Error{ErrorCode::kUnavailable, "cannot create a ZeroMQ socket: " + last_error()};
  constexpr int kReconnectMs = 100, kReconnectMaxMs = 1000, kHandshakeMs = 2000, kBacklog = 4096;
  set(handle_, ZMQ_LINGER, 0);
  set(handle_, ZMQ_MAXMSGSIZE, options.message_bytes_max);
  set(handle_, ZMQ_RCVHWM, options.receive_queue_max);
  set(handle_, ZMQ_SNDHWM, options.send_queue_max);
  set(handle_, ZMQ_BACKLOG, kBacklog);
  set(handle_, ZMQ_CONNECT_TIMEOUT, options.connect_timeout_ms);
  set(handle_, ZMQ_RECONNECT_IVL, kReconnectMs);
  set(handle_, ZMQ_RECONNECT_IVL_MAX, kReconnectMaxMs);
  set(handle_, ZMQ_HANDSHAKE_IVL, kHandshakeMs);
  set(handle_, ZMQ_IMMEDIATE, options.queues_unconnected ? 0 : 1);
  // ZMQ_HEARTBEAT_IVL stays off: if it is set and the receive queue is full, a lost connection ends the process by an
  // assertion (libzmq issues 3937, 4364, 4767). Of the connections to dead hosts, keepalive closes the idle ones, and
  // the time limit on unacknowledged bytes closes the others: without this limit the kernel sends again for 15 minutes,
  // for example after a firewall has dropped the connection.
  set(handle_, ZMQ_TCP_KEEPALIVE, 1);
  set(handle_, ZMQ_TCP_KEEPALIVE_IDLE, kKeepaliveIdleSeconds);
  set(handle_, ZMQ_TCP_KEEPALIVE_INTVL, kKeepaliveIntervalSeconds);
  set(handle_, ZMQ_TCP_KEEPALIVE_CNT, kKeepaliveProbes);
  set(handle_, ZMQ_TCP_MAXRT, kUnacknowledgedMs);
  if (kind == ZmqKind::kSubscriber) {
    ::zmq_setsockopt(handle_, ZMQ_SUBSCRIBE, "", 0);
    return {};
  }
  is_router_ = kind == ZmqKind::kRouter;
  if (is_router_) set(handle_, ZMQ_ROUTER_MANDATORY, 1);
  pending_.emplace(std::nothrow);
  epoll_ = OwnedFd(::epoll_create1(EPOLL_CLOEXEC));
  for (const int fd : {get<int>(handle_, ZMQ_FD), pending_->fd()}) {
    epoll_event event{.events = EPOLLIN, .data = {}};
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
      return Error{ErrorCode::kUnavailable,
                   "no file descriptor is left for a ZeroMQ socket; raise the limit (ulimit -n)"};
  }
  return {};
}

Result<void> ZmqSocket::bind(std::string endpoint) {
  // ZeroMQ binds addresses and interfaces, not host names.
  constexpr std::string_view kLocalhost = "tcp://localhost:";
  if (endpoint.starts_with(kLocalhost)) endpoint.replace(0, kLocalhost.size(), "tcp://127.0.0.1:");
  set(handle_, ZMQ_IPV6, endpoint.starts_with("tcp://[") || endpoint.starts_with("tcp://*:") ? 1 : 0);
  if (endpoint.starts_with("ipc://") && !set(handle_, ZMQ_IPC_FILTER_UID, ::geteuid()))
    return Error{ErrorCode::kUnavailable,
                 fmt::format("cannot keep other users from connecting to {}: libzmq has no ZMQ_IPC_FILTER_UID; use a "
                             "tcp:// endpoint, or a libzmq that has it",
                             endpoint)};
  key_version_ = context_->key_version();
  key_ = KVFERRY_TRY(context_->secure_server(handle_, endpoint));
  if (is_router_ && endpoint.starts_with("tcp://")) KVFERRY_TRY(start_watching(ZMQ_EVENT_ACCEPTED));
  if (::zmq_bind(handle_, endpoint.c_str()) != 0) {
    const bool is_foreign = ::zmq_errno() == ENODEV || ::zmq_errno() == EADDRNOTAVAIL;
    return Error{ErrorCode::kUnavailable,
                 fmt::format("cannot listen on {}: {}{}", endpoint, last_error(),
                             is_foreign ? "; HOST must be *, or an address or interface of this machine" : "")};
  }
  char bound[256] = "";
  std::size_t bytes = sizeof(bound);
  ::zmq_getsockopt(handle_, ZMQ_LAST_ENDPOINT, bound, &bytes);
  endpoint_ = bound;
  return {};
}

Result<void> ZmqSocket::connect(const std::string& endpoint) {
  key_version_ = context_->key_version();
  key_ = KVFERRY_TRY(context_->secure_client(handle_, endpoint));
  endpoint_ = endpoint;
  is_ipv6_ = endpoint.starts_with("tcp://[");
  set(handle_, ZMQ_IPV6, is_ipv6_ ? 1 : 0);
  if (!key_.empty() && context_->public_keys().size() > 1) KVFERRY_TRY(start_watching(0));
  if (::zmq_connect(handle_, endpoint.c_str()) == 0) return {};
  return Error{
      ErrorCode::kInvalidArgument,
      fmt::format("cannot connect to {}: {}; allowed: tcp://HOST:PORT and ipc://PATH", endpoint, last_error())};
}

Result<void> ZmqSocket::reconnect() {
  if (has_host_name(endpoint_)) is_ipv6_ = !is_ipv6_;
  ::zmq_disconnect(handle_, endpoint_.c_str());
  set(handle_, ZMQ_IPV6, is_ipv6_ ? 1 : 0);
  return connect_again();
}

Result<void> ZmqSocket::connect_again() {
  const bool is_connecting = ::zmq_connect(handle_, endpoint_.c_str()) == 0;
  report_pending();
  if (is_connecting) return {};
  return Error{ErrorCode::kUnavailable, fmt::format("cannot connect to {}: {}", endpoint_, last_error())};
}

int ZmqSocket::fd() const { return epoll_ ? epoll_.get() : get<int>(handle_, ZMQ_FD); }

bool ZmqSocket::send(std::span<const std::string_view> parts) {
  bool is_sent = true;
  for (std::size_t i = 0; i < parts.size() && is_sent; ++i) {
    const int more = i + 1 < parts.size() ? ZMQ_SNDMORE : 0;
    is_sent = ::zmq_send(handle_, parts[i].data(), parts[i].size(), ZMQ_DONTWAIT | more) >= 0;
  }
  report_pending();
  return is_sent;
}

void ZmqSocket::report_pending() {
  if ((is_router_ && !is_drained_) || is_pending_ || !pending_ || (get<int>(handle_, ZMQ_EVENTS) & ZMQ_POLLIN) == 0)
    return;
  is_pending_ = true;
  pending_->set();
}

std::size_t ZmqSocket::receive(std::span<ZmqPart> parts) {
  constexpr std::uint32_t kReceivesPerWatch = 256;  // a flood of messages must not keep connections unwatched
  if (++num_receives_ % kReceivesPerWatch == 0) watch_connections();
  ZmqPart dropped;
  for (std::size_t num_parts = 0;; ++num_parts) {
    zmq_msg_t* const part = message((num_parts < parts.size() ? parts[num_parts] : dropped).message_);
    if (::zmq_msg_recv(part, handle_, ZMQ_DONTWAIT) < 0) break;
    if (::zmq_msg_more(part) != 0) continue;
    is_drained_ = false;
    return num_parts + 1;
  }
  is_drained_ = true;
  watch_connections();
  if (std::exchange(is_pending_, false)) pending_->clear();
  return 0;
}

Identity ZmqSocket::sender_of(std::span<const ZmqPart> parts) const {
  if (key_.empty()) return {};
  // The last part is used, because ZeroMQ itself makes the first part of a router's message, and that part lacks the
  // sender if ZeroMQ has fetched the message ahead, as it does while an answer is sent.
  zmq_msg_t* const part = message(parts.back().message_);
  const char* const user_id = ::zmq_msg_gets(part, "User-Id");
  std::optional<Identity> sender = user_id == nullptr ? std::nullopt : context_->identity_of(user_id);
  if (sender) return *std::move(sender);
  // The connection's descriptor may belong to another connection by now. The comparison of the addresses avoids ending
  // a connection from another host.
  const int fd = ::zmq_msg_get(part, ZMQ_SRCFD);
  const char* const host = ::zmq_msg_gets(part, "Peer-Address");
  const std::string peer = fd < 0 ? "" : peer_address(fd).host;
  if (host != nullptr && !peer.empty() && std::string_view(host).ends_with(peer)) ::shutdown(fd, SHUT_RDWR);
  return {.name = {}, .role = Role::kNone};
}

std::string ZmqSocket::curve_key_of(std::span<const ZmqPart> parts) const {
  if (key_.empty() || !context_->has_members()) return {};
  const char* const user_id = ::zmq_msg_gets(message(parts.back().message_), "User-Id");
  return user_id == nullptr ? "" : user_id;
}

void ZmqSocket::set_linger(int ms) { set(handle_, ZMQ_LINGER, ms); }

Result<std::unique_ptr<ZmqSocket>> ZmqSocket::make_monitor() {
  return monitor(ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED);
}

Result<std::unique_ptr<ZmqSocket>> ZmqSocket::monitor(int events) {
  static std::atomic<std::uint64_t> num_monitors{0};
  const std::string name = fmt::format("inproc://kvferry-monitor-{}", ++num_monitors);
  std::unique_ptr<ZmqSocket> made(new ZmqSocket(context_, ZMQ_PAIR));
  if (made->handle_ != nullptr) set(made->handle_, ZMQ_RCVHWM, 0);  // no limit, since a full queue blocks ZeroMQ
  made->monitored_ = handle_;
  if (made->handle_ == nullptr || ::zmq_socket_monitor(handle_, name.c_str(), events) != 0 ||
      ::zmq_connect(made->handle_, name.c_str()) != 0)
    return Error{ErrorCode::kUnavailable, "cannot monitor the connections of a ZeroMQ socket: " + last_error()};
  set(made->handle_, ZMQ_LINGER, 0);
  return made;
}

/// Returns the next event of a monitor, nullopt if none waits.
std::optional<ZmqSocket::Event> ZmqSocket::next_event() {
  ZmqPart parts[2];  // part 0: type and value; part 1: address
  if (receive(parts) == 0) return std::nullopt;
  std::uint16_t type = 0;
  std::int32_t value = 0;
  const std::string_view bytes = parts[0].bytes();
  if (bytes.size() == sizeof type + sizeof value) {
    std::memcpy(&type, bytes.data(), sizeof type);
    std::memcpy(&value, bytes.data() + sizeof type, sizeof value);
  }
  return Event{type, value};
}

ZmqSocket::Change ZmqSocket::next_change() {
  while (const std::optional<Event> event = next_event()) {
    if (event->type == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) return Change::kConnected;
    if (event->type == ZMQ_EVENT_DISCONNECTED) return Change::kDisconnected;
  }
  return Change::kNone;
}

Result<void> ZmqSocket::start_watching(int events) {
  connections_ = KVFERRY_TRY(monitor(kRefusals | events));
  epoll_event event{.events = EPOLLIN, .data = {}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, connections_->fd(), &event) == 0) return {};
  connections_.reset();
  return Error{ErrorCode::kUnavailable, "no file descriptor is left for a ZeroMQ socket; raise the limit (ulimit -n)"};
}

void ZmqSocket::watch_connections() {
  bool was_refused = false;
  while (connections_) {
    const std::optional<Event> event = connections_->next_event();
    if (!event) break;
    if (event->type == ZMQ_EVENT_ACCEPTED) reserve_.accepted(event->value, endpoint_);
    if ((event->type & kRefusals) == 0) continue;
    ++num_handshakes_failed_;
    was_refused = true;
  }
  if (!key_.empty()) follow_key(was_refused);
}

}  // namespace kvferry::net
