#include "controller/http/http_connections.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <utility>

#include "transport/base/log.h"

namespace kvferry::controller {
namespace {

constexpr std::uint64_t kListenerTag = 0, kWakeUpTag = ~std::uint64_t{0};
constexpr int kCheckMs = 100;

bool watch(int epoll, int how, int fd, std::uint32_t events, std::uint64_t tag) {
  epoll_event event{.events = events, .data = {.u64 = tag}};
  return ::epoll_ctl(epoll, how, fd, &event) == 0;
}

}  // namespace

HttpConnections::~HttpConnections() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  wanted_.notify_all();
  wake_up_.set();
  for (std::thread& thread : threads_) thread.join();
}

Result<std::uint16_t> HttpConnections::start(const net::HostPort& address) {
  Result<net::TcpListener> listening = net::listen_tcp(address.host, address.port);
  if (!listening)
    return Error{ErrorCode::kUnavailable, fmt::format("{}; allowed: a free port (0: any) of an address of this machine",
                                                      listening.error().what)};
  listener_ = std::move(*listening);
  epoll_ = OwnedFd(::epoll_create1(EPOLL_CLOEXEC));
  if (!watch(epoll_.get(), EPOLL_CTL_ADD, listener_.socket.get(), EPOLLIN, kListenerTag) ||
      !watch(epoll_.get(), EPOLL_CTL_ADD, wake_up_.fd(), EPOLLIN, kWakeUpTag))
    return Error{ErrorCode::kUnavailable,
                 "no file descriptor is left for the HTTP listener; raise the limit (ulimit -n)"};
  threads_.emplace_back([this] { run(); });
  for (std::size_t i = 0; i < kHttpThreads; ++i) threads_.emplace_back([this] { work(); });
  return listener_.address.port;
}

void HttpConnections::run() {
  std::array<epoll_event, 64> events;
  for (TimeNs checked_at = 0;;) {
    const int num_events = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                                        connections_.empty() ? -1 : kCheckMs);
    {
      const std::lock_guard lock(mutex_);
      if (is_ending_) return;
    }
    for (int i = 0; i < num_events; ++i) {
      const std::uint64_t tag = events[static_cast<std::size_t>(i)].data.u64;
      if (tag == kListenerTag) accept_all();
      if (tag == kWakeUpTag) take_answers();
      const auto found = connections_.find(tag);
      if (found != connections_.end() && !on_ready(tag, found->second)) close(found);
    }
    if (const TimeNs now = clock_.now(); now - checked_at >= kCheckMs * kMillisecond) {
      checked_at = now;
      end_overdue(now);
    }
  }
}

void HttpConnections::work() {
  for (;;) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      wanted_.wait(lock, [&] { return is_ending_ || !jobs_.empty(); });
      if (is_ending_) return;
      job = jobs_.pop();
    }
    job.bytes = answer_(job.bytes, job.is_last);
    {
      const std::lock_guard lock(mutex_);
      answers_.push_back(std::move(job));
    }
    wake_up_.set();
  }
}

void HttpConnections::accept_all() {
  constexpr int kAcceptsAtOnce = 64;
  for (int i = 0; i < kAcceptsAtOnce; ++i) {
    OwnedFd socket = net::accept_tcp(listener_.socket.get());
    if (!socket && spare_.refuse(listener_.socket.get(), "http")) continue;
    if (!socket) return;
    if (connections_.size() >= kHttpConnectionsMax) end_slowest();
    if (connections_.size() >= kHttpConnectionsMax) continue;  // the destructor of `socket` closes it
    Connection connection;
    connection.since = clock_.now();
    connection.host = net::peer_address(socket.get()).host;
    connection.socket = HttpSocket(std::move(socket), certificate_ ? certificate_->current(connection.since) : nullptr);
    if (watch(epoll_.get(), EPOLL_CTL_ADD, connection.socket.fd(), EPOLLIN | EPOLLONESHOT, ++last_id_))
      connections_.emplace(last_id_, std::move(connection));
  }
}

/// Ends a connection that waits for its client: of the host that has most connections, the one that has waited longest.
void HttpConnections::end_slowest() {
  std::unordered_map<std::string_view, std::size_t> num_of_host;
  for (const auto& [id, connection] : connections_) ++num_of_host[connection.host];
  auto slowest = connections_.end();
  const auto rank = [&](const Connection& one) { return std::pair(num_of_host.at(one.host), -one.since); };
  for (auto one = connections_.begin(); one != connections_.end(); ++one) {
    if (one->second.state == State::kAnswering) continue;
    if (slowest == connections_.end() || rank(one->second) > rank(slowest->second)) slowest = one;
  }
  if (slowest == connections_.end()) return;
  if (std::has_single_bit(++num_ended_))
    log().warn(
        "HTTP: closed a slow or idle connection from {} ({} so far), because the limit of {} connections is reached",
        slowest->second.host, num_ended_, kHttpConnectionsMax);
  close(slowest);
}

void HttpConnections::end_overdue(TimeNs now) {
  for (auto one = connections_.begin(); one != connections_.end();) {
    const auto next = std::next(one);
    const Connection& connection = one->second;
    const TimeNs limit = connection.state != State::kReading ? kHttpAnswerMax
                         : connection.in.empty()             ? kHttpIdleMax
                                                             : kHttpRequestMax;
    if (connection.state != State::kAnswering && now - connection.since >= limit) close(one);
    one = next;
  }
}

void HttpConnections::take_answers() {
  wake_up_.clear();
  std::vector<Job> answers;
  {
    const std::lock_guard lock(mutex_);
    answers.swap(answers_);
  }
  for (Job& answer : answers) {
    const auto found = connections_.find(answer.connection);
    if (found == connections_.end()) continue;
    Connection& connection = found->second;
    connection.state = State::kWriting;
    connection.out = std::move(answer.bytes);
    connection.num_sent = 0;
    connection.is_last = answer.is_last;
    connection.since = clock_.now();
    if (!account(connection) || !write(found->first, connection)) close(found);
  }
}

void HttpConnections::close(Connections::iterator connection) {
  large_bytes_ -= connection->second.num_large;
  connections_.erase(connection);
}

bool HttpConnections::on_ready(std::uint64_t id, Connection& connection) {
  return connection.state == State::kWriting ? write(id, connection) : read(id, connection);
}

bool HttpConnections::read(std::uint64_t id, Connection& connection) {
  const bool is_first = connection.in.empty();
  const ssize_t got = connection.socket.receive(connection.in);
  if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return false;
  if (connection.state == State::kDraining) connection.in.clear();
  if (got < 0 || connection.state == State::kDraining) return arm(id, connection, EPOLLIN);
  if (is_first) connection.since = clock_.now();
  return account(connection) && parse(id, connection);
}

/// Queues the request for the threads that compute answers, once the request is complete or must be refused.
bool HttpConnections::parse(std::uint64_t id, Connection& connection) {
  HttpFraming& framing = connection.framing;
  const HttpFraming::State state = framing.read(connection.in);
  const bool is_refused = framing.has_head() && !may_send_body_(framing.authorization());
  if (state == HttpFraming::State::kIncomplete && !is_refused) {
    if (framing.awaits_continue() && !std::exchange(connection.is_continued, true)) {
      constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
      connection.socket.send(kContinue);
    }
    return arm(id, connection, EPOLLIN);
  }
  const bool is_last = state != HttpFraming::State::kComplete;
  Job job{id, connection.in.substr(0, is_last ? std::string::npos : framing.size()), is_last};
  connection.in.erase(0, job.bytes.size());
  framing = {};
  connection.is_continued = false;
  connection.state = State::kAnswering;  // epoll does not report the socket until the answer is ready
  {
    const std::lock_guard lock(mutex_);
    jobs_.push(connection.host, std::move(job));
  }
  wanted_.notify_one();
  return true;
}

bool HttpConnections::write(std::uint64_t id, Connection& connection) {
  const std::string_view left = std::string_view(connection.out).substr(connection.num_sent);
  const ssize_t sent = connection.socket.send(left);
  if (sent < 0 && errno != EAGAIN && errno != EINTR) return false;
  connection.num_sent += static_cast<std::size_t>(std::max<ssize_t>(sent, 0));
  if (connection.num_sent < connection.out.size() || connection.socket.has_unsent())
    return arm(id, connection, EPOLLOUT);
  connection.out.clear();
  connection.since = clock_.now();
  if (connection.is_last) {
    // Bytes that the client still sends are read, because closing a socket with unread bytes would discard the answer.
    connection.socket.end_sending();
    connection.state = State::kDraining;
    connection.in.clear();
    return account(connection) && arm(id, connection, EPOLLIN);
  }
  connection.state = State::kReading;
  if (!account(connection)) return false;
  return connection.in.empty() ? arm(id, connection, EPOLLIN) : parse(id, connection);
}

/// Updates the connection's part of large_bytes_. Returns false if this part has grown and large_bytes_ exceeds
/// kHttpLargeBytesMax. The bytes of a request count until its answer is ready.
bool HttpConnections::account(Connection& connection) {
  const std::size_t bytes = connection.in.size() + connection.out.size();
  const std::size_t num_large = bytes > kHttpSmallBytes ? bytes : 0;
  const bool has_grown = num_large > connection.num_large;
  large_bytes_ += num_large - connection.num_large;
  connection.num_large = num_large;
  return !has_grown || large_bytes_ <= kHttpLargeBytesMax;
}

bool HttpConnections::arm(std::uint64_t id, const Connection& connection, std::uint32_t events) {
  if (connection.socket.has_unsent()) events |= EPOLLOUT;
  return watch(epoll_.get(), EPOLL_CTL_MOD, connection.socket.fd(), events | EPOLLONESHOT, id);
}

}  // namespace kvferry::controller
