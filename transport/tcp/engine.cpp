#include "transport/tcp/engine.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <random>

#include "transport/base/log.h"

namespace kvferry::tcp {
namespace {

constexpr std::uint64_t kListenerTag = 1;  // connections count from 2
constexpr std::size_t kConnectionsMax = 4096;
constexpr int kAcceptsAtOnce = 32;

std::uint64_t random_number() {
  std::random_device random;
  return (std::uint64_t{random()} << 32) | random();
}

std::string random_secret() {
  std::string secret;
  for (int half = 0; half < 2; ++half) {
    const std::uint64_t number = random_number();
    append_bytes(secret, &number, sizeof(number));
  }
  return secret;
}

}  // namespace

Engine::Engine(const TcpOptions& options, std::uint64_t incarnation, TransferTable& transfer_table)
    : options_(options),
      incarnation_(incarnation),
      table_(transfer_table),
      secret_(random_secret()),
      acceptor_(*this, incarnation, secret_, [this](Connection& one, const Hello& hello) { welcome(one, hello); }),
      loop_(*this, "kvferry-tcp", options.spin_ns, 0) {}

Result<void> Engine::start() {
  Result<Listening> listening = listen_on(options_.listen_host, options_.listen_port);
  if (!listening) return std::move(listening).error();
  listener_ = std::move(listening->socket);
  spare_ = OwnedFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  endpoints_ = std::move(listening->endpoints);
  address_ = encode(Address{kProtocolVersion, incarnation_, secret_, endpoints_});
  signature_ = address_;
  loop_.watch(listener_.get(), EPOLLIN, kListenerTag);
  loop_.start();
  return {};
}

void Engine::accept_all() {
  for (int count = 0; count < kAcceptsAtOnce; ++count) {
    OwnedFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket.get() < 0) {
      if (errno != EMFILE && errno != ENFILE) return;
      log().error("tcp: no file descriptor left: a peer's connection was turned away");
      spare_ = OwnedFd();
      OwnedFd(::accept(listener_.get(), nullptr, nullptr));  // and closes it
      spare_ = OwnedFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
      continue;
    }
    if (connections_.size() >= kConnectionsMax) {
      log().error("tcp: a peer's connection was turned away: {} are open, which is the limit", kConnectionsMax);
      continue;
    }
    set_connection_options(socket.get());
    skip_congestion_control_within_host(socket.get());
    acceptor_.greet(std::move(socket));
  }
}

Connection& Engine::adopt(OwnedFd socket, FrameHandler& handler, bool is_connecting) {
  const std::uint64_t id = kListenerTag + ++num_connections_made_;
  const int fd = socket.get();
  auto& connection =
      *connections_.emplace(id, std::make_unique<Connection>(id, std::move(socket), handler, is_connecting, now()))
           .first->second;
  loop_.watch(fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, id);
  return connection;
}

void Engine::wake(Connection& connection) {
  if (connection.mark_queued(true)) ready_.push_back(connection.id());
}

void Engine::close(Connection& connection) {
  if (connection.is_closed()) return;
  loop_.unwatch(connection.fd());
  connection.close();
  const auto found = connections_.find(connection.id());
  closed_connections_.push_back(std::move(found->second));
  connections_.erase(found);
}

void Engine::arm() {
  if (check_at_ != ProgressLoop::kNever) return;
  check_at_ = now() + options_.silence_ns / 4;
  is_timer_new_ = true;
}

void Engine::welcome(Connection& connection, const Hello& hello) {
  auto& link = inbound_[hello.link];
  if (link == nullptr)
    link = std::make_unique<InboundLink>(*this, hello.from, [this, id = hello.link] { drop_inbound(id); });
  const bool is_added = link->add(connection);
  connection.send({.kind = FrameKind::kWelcome}, is_added ? "" : "the link has too many connections");
  if (is_added) return;
  connection.flush(1);
  close(connection);
}

void Engine::drop_inbound(std::uint64_t link) {
  const auto found = inbound_.find(link);
  closed_links_.push_back(std::move(found->second));
  inbound_.erase(found);
}

void Engine::on_ready(std::uint64_t tag, std::uint32_t events) {
  if (tag == kListenerTag) return accept_all();
  const auto found = connections_.find(tag);
  if (found == connections_.end()) return;
  found->second->on_ready(events);
  wake(*found->second);
}

bool Engine::advance(TimeNs now) {
  closed_connections_.clear();
  closed_links_.clear();
  turn_.clear();
  std::swap(turn_, ready_);
  for (const std::uint64_t id : turn_) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) continue;
    Connection& connection = *found->second;
    connection.mark_queued(false);
    if (connection.advance(now)) wake(connection);
    if (!connection.is_closed() && connection.is_in_the_middle()) arm();
  }
  if (now >= check_at_) check(now);
  return !ready_.empty();
}

void Engine::check(TimeNs now) {
  // A peer is silent only while this thread listens: who was paused for half of the time asks anew.
  if (now - check_at_ >= options_.silence_ns / 4) {
    for (const auto& [id, connection] : connections_) connection->forgive(now);
  }
  bool is_owed = acceptor_.check(now);
  for (const auto& [peer, link] : outbound_) is_owed |= link->check(now);
  std::vector<InboundLink*> inbound;
  for (const auto& [token, link] : inbound_) inbound.push_back(link.get());
  for (InboundLink* link : inbound) is_owed |= link->check(now);
  check_at_ = is_owed ? now + options_.silence_ns / 4 : ProgressLoop::kNever;
}

void Engine::add_peer(PeerId peer, Address address) {
  if (is_shut_down_) return;
  auto link = std::make_unique<OutboundLink>(*this, peer, std::move(address), random_number());
  outbound_.emplace(peer, std::move(link)).first->second->start();
}

void Engine::drop_peer(PeerId peer) {
  const auto found = outbound_.find(peer);
  if (found == outbound_.end()) return;
  found->second->end(ErrorCode::kPeerLost, "the peer was disconnected");
  closed_links_.push_back(std::move(found->second));
  outbound_.erase(found);
}

void Engine::submit(AcceptedTransfer transfer) {
  const auto found = outbound_.find(transfer.peer);
  if (is_shut_down_) {
    table_.complete(transfer.id, ErrorCode::kCancelled, "the transport was shut down");
  } else if (found == outbound_.end()) {
    table_.complete(transfer.id, ErrorCode::kPeerLost, "the peer was disconnected");
  } else {
    found->second->submit(std::move(transfer));
  }
}

void Engine::feed(TransferId id, FedCopies more) {
  for (const auto& [peer, link] : outbound_) {
    if (link->feed(id, more)) return;
  }
}

void Engine::cancel(TransferId id) {
  for (const auto& [peer, link] : outbound_) {
    if (link->cancel(id)) return;
  }
}

void Engine::shut_down() {
  if (std::exchange(is_shut_down_, true)) return;
  for (const auto& [peer, link] : outbound_) link->end(ErrorCode::kCancelled, "the transport was shut down");
  std::vector<InboundLink*> inbound;
  for (const auto& [token, link] : inbound_) inbound.push_back(link.get());
  for (InboundLink* link : inbound) link->close();
  std::vector<Connection*> rest;
  for (const auto& [id, connection] : connections_) rest.push_back(connection.get());
  for (Connection* connection : rest) close(*connection);
  loop_.unwatch(listener_.get());
  listener_ = OwnedFd();
  ready_.clear();
  check_at_ = ProgressLoop::kNever;
}

}  // namespace kvferry::tcp
