#include "transport/tcp/tcp_backend.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "transport/backend_transport.h"
#include "transport/base/log.h"

namespace kvferry::tcp {
namespace {

constexpr std::uint64_t kListenerTag = 1;  // connections have the tags from 2 on
constexpr std::size_t kConnectionsMax = 4096;
constexpr int kAcceptsAtOnce = 32;

/// Returns the addresses at which peers can reach the listener. For a listener on all interfaces these are at most
/// kAddressesMax of this host's addresses, only IPv4 ones if it listens on 0.0.0.0. Loopback is the last one, because
/// it reaches this host only.
std::vector<net::HostPort> reachable_addresses(const net::HostPort& listening_on) {
  constexpr std::size_t kAddressesMax = 16;
  const bool is_any_ipv4 = listening_on.host == "0.0.0.0";
  if (listening_on.host != "::" && !is_any_ipv4) return {listening_on};
  std::vector<net::HostPort> reachable;
  for (const std::string& host : net::interface_addresses()) {
    const bool is_ipv6 = host.find(':') != std::string::npos;
    if (reachable.size() + 1 < kAddressesMax && !(is_ipv6 && is_any_ipv4))
      reachable.push_back({host, listening_on.port});
  }
  reachable.push_back({"127.0.0.1", listening_on.port});
  return reachable;
}

}  // namespace

TcpBackend::TcpBackend(const TcpOptions& options)
    : Backend(options.transfers_max),
      options_(options),
      secret_(random_bytes(16)),
      tls_(options.key ? std::make_unique<net::TlsContext>(*options.key, options.encrypt) : nullptr),
      acceptor_(*this, incarnation_, secret_, [this](Connection& one, const Hello& hello) { welcome(one, hello); }),
      loop_(*this, "kvferry-tcp", options.spin_ns, 0) {}

Result<void> TcpBackend::start() {
  auto listening = KVFERRY_TRY(net::listen_in_range(
      options_.listen_ports, [&](std::uint16_t port) { return net::listen_tcp(options_.listen_host, port); }));
  listener_ = std::move(listening.socket);
  endpoints_ = reachable_addresses(listening.address);
  address_ = encode(Address{kProtocolVersion, incarnation_, secret_, endpoints_, tls_ != nullptr});
  source_address_ = address_;
  if (tls_ != nullptr && tls_->key().has_file()) {
    key_version_ = tls_->key().version();
    key_check_at_ = now();
  }
  if (!loop_.watch(listener_.get(), EPOLLIN, kListenerTag))
    return Error{ErrorCode::kUnavailable,
                 fmt::format("tcp: cannot watch the listening socket: {}", std::strerror(errno))};
  loop_.start();
  return {};
}

std::string TcpBackend::describe() const {
  const std::string secured = tls_ == nullptr
                                  ? "connections without a cluster key"
                                  : fmt::format("connections with the cluster key, encryption {}",
                                                net::kEncryptNames[static_cast<std::size_t>(options_.encrypt)]);
  return fmt::format(
      "TCP sockets, {}; up to {} connections to a peer on another host; listening on {}; {} connections refused",
      secured, options_.connections, net::to_text(endpoints_.front()), acceptor_.num_refused());
}

Result<std::uint64_t> TcpBackend::check_address(const std::string& address) {
  const Address peer = KVFERRY_TRY(read_address<Address>(address, kProtocolVersion, "TCP"));
  if (peer.has_key != (tls_ != nullptr))
    return Error{ErrorCode::kInvalidArgument, fmt::format("the peer has {} cluster key for TCP, and this side has {}; "
                                                          "both sides need the same key (cluster_key_file), or none",
                                                          peer.has_key ? "a" : "no", tls_ != nullptr ? "one" : "none")};
  return peer.incarnation;
}

bool TcpBackend::wait(TimeNs timeout_ns) {
  const std::optional<bool> driven =
      loop_.drive(timeout_ns, [this] { return table_.completion_queue().has_something(); });
  return driven ? *driven : Backend::wait(timeout_ns);
}

void TcpBackend::set_wait_interrupt_fd(int fd) {
  Backend::set_wait_interrupt_fd(fd);
  loop_.add_wakeup_fd(fd);
}

Result<Backend::RegionKey> TcpBackend::open_region(RegionId, const MemoryRegion& memory) {
  KVFERRY_TRY(TransferTable::check_host_region(memory, "TCP"));
  return RegionKey{};
}

void TcpBackend::accept_all() {
  for (int count = 0; count < kAcceptsAtOnce; ++count) {
    OwnedFd socket = net::accept_tcp(listener_.get());
    if (socket.get() < 0) {
      if (spare_.refuse(listener_.get(), "tcp")) continue;
      return;
    }
    if (connections_.size() >= kConnectionsMax) {
      if (std::has_single_bit(++num_refused_))
        log().error("tcp: refused a connection to this process ({} so far): the limit of {} connections is reached",
                    num_refused_, kConnectionsMax);
      continue;
    }
    skip_congestion_control_within_host(socket.get());
    acceptor_.accept(std::move(socket));
  }
}

Connection& TcpBackend::adopt(OwnedFd socket, MessageHandler& handler, bool is_connecting) {
  const std::uint64_t id = kListenerTag + ++num_connections_made_;
  const int fd = socket.get();
  auto& connection =
      *connections_.emplace(id, std::make_unique<Connection>(id, std::move(socket), handler, is_connecting, now()))
           .first->second;
  if (tls_ != nullptr) connection.secure(std::make_unique<net::TlsSession>(*tls_, fd, !is_connecting));
  if (!loop_.watch(fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, id) && std::has_single_bit(++num_unwatched_))
    log().error("tcp: a connection will fail as silent ({} so far), because epoll can't watch it: {}", num_unwatched_,
                std::strerror(errno));
  return connection;
}

void TcpBackend::wake(Connection& connection) {
  if (connection.mark_queued(true)) ready_.push_back(connection.id());
}

void TcpBackend::close(Connection& connection) {
  if (connection.is_closed()) return;
  loop_.unwatch(connection.fd());
  connection.close();
  const auto found = connections_.find(connection.id());
  closed_connections_.push_back(std::move(found->second));
  connections_.erase(found);
}

void TcpBackend::arm_silence_check() {
  if (check_at_ != ProgressLoop::kNever) return;
  check_at_ = now() + options_.silence_ns / 4;
  is_timer_new_ = true;
}

void TcpBackend::welcome(Connection& connection, const Hello& hello) {
  auto& link = inbound_[hello.link];
  if (link == nullptr)
    link = std::make_unique<InboundLink>(*this, hello.from, [this, id = hello.link] { drop_inbound(id); });
  const bool is_added = link->add(connection, tls_ ? tls_->member_of(connection.key_name()) : std::nullopt);
  connection.send({.kind = MessageKind::kWelcome},
                  is_added ? "" : "at most 64 connections from one process are allowed");
  if (is_added) return;
  connection.flush(1);
  close(connection);
}

void TcpBackend::drop_inbound(std::uint64_t link) {
  const auto found = inbound_.find(link);
  closed_links_.push_back(std::move(found->second));
  inbound_.erase(found);
}

void TcpBackend::on_ready(std::uint64_t tag, std::uint32_t events) {
  if (tag == kListenerTag) return accept_all();
  const auto found = connections_.find(tag);
  if (found == connections_.end()) return;
  found->second->on_ready(events);
  wake(*found->second);
}

bool TcpBackend::advance(TimeNs now) {
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
    if (!connection.is_closed() && connection.is_in_the_middle()) arm_silence_check();
  }
  if (now >= key_check_at_) follow_key(now);
  if (now >= check_at_) check(now);
  is_timer_new_ = false;  // the loop takes a new check_at_ into account after each advance()
  return !ready_.empty();
}

void TcpBackend::follow_key(TimeNs now) {
  key_check_at_ = now + net::ClusterKey::kLookEveryNs;
  const std::uint64_t version = tls_->key().version();
  if (version == key_version_ && !is_renewing_) return;
  key_version_ = version;
  const std::vector<std::string> accepted = tls_->key_names();
  std::vector<std::uint64_t> removed;
  for (const auto& [id, connection] : connections_) {
    const std::string& name = connection->key_name();
    if (!name.empty() && std::find(accepted.begin(), accepted.end(), name) == accepted.end()) removed.push_back(id);
  }
  is_renewing_ = false;
  const std::string in_use = tls_->key_in_use();
  for (const auto& [peer, link] : outbound_) is_renewing_ |= !link->renew_key(in_use);
  for (const std::uint64_t id : removed) {
    if (const auto found = connections_.find(id); found != connections_.end())
      found->second->fail(
          "the connection was made with a cluster key that is not accepted any more (cluster_key_file)");
  }
}

void TcpBackend::check(TimeNs now) {
  // Only time in which this process ran counts as a peer's silence: after a pause, silence counts from zero.
  if (now - check_at_ >= options_.silence_ns / 4) {
    for (const auto& [id, connection] : connections_) connection->reset_silence(now);
  }
  bool is_owed = false;
  for (const auto& [peer, link] : outbound_) is_owed |= link->check(now);
  std::vector<InboundLink*> inbound;
  for (const auto& [token, link] : inbound_) inbound.push_back(link.get());
  for (InboundLink* link : inbound) is_owed |= link->check(now);
  check_at_ = std::min(acceptor_.check(now), is_owed ? now + options_.silence_ns / 4 : ProgressLoop::kNever);
}

void TcpBackend::add_peer(PeerId peer, const std::string& address) {
  auto link =
      std::make_unique<OutboundLink>(*this, peer, decode<Address>(address, "peer address").value(), random_number());
  outbound_.emplace(peer, std::move(link)).first->second->start();
}

void TcpBackend::drop_peer(PeerId peer) {
  const auto found = outbound_.find(peer);
  found->second->end(ErrorCode::kPeerLost, "this process disconnected the peer");
  closed_links_.push_back(std::move(found->second));
  outbound_.erase(found);
}

void TcpBackend::submit(AcceptedTransfer transfer) {
  const auto& link = outbound_.at(transfer.peer);
  link->submit(std::move(transfer));
}

void TcpBackend::feed(FedCopies more) {
  if (const auto link = outbound_.find(more.peer); link != outbound_.end()) link->second->feed(more);
}

void TcpBackend::cancel(PeerId peer, TransferId id) {
  if (const auto link = outbound_.find(peer); link != outbound_.end()) link->second->cancel(id);
}

void TcpBackend::stop() {
  for (const auto& [peer, link] : outbound_) link->end(ErrorCode::kCancelled, "this process shuts its transport down");
  std::vector<InboundLink*> inbound;
  for (const auto& [token, link] : inbound_) inbound.push_back(link.get());
  for (InboundLink* link : inbound) link->close();
  std::vector<Connection*> rest;
  for (const auto& [id, connection] : connections_) rest.push_back(connection.get());
  for (Connection* connection : rest) close(*connection);
  loop_.unwatch(listener_.get());
  listener_ = OwnedFd();
  ready_.clear();
  check_at_ = key_check_at_ = ProgressLoop::kNever;
}

}  // namespace kvferry::tcp

namespace kvferry {

Result<std::unique_ptr<Transport>> make_tcp_transport(const TcpOptions& options) {
  constexpr std::size_t kLanesMax = tcp::InboundLink::kLanesMax;
  KVFERRY_TRY(check_options("the TCP backend", {{"transfers_max", options.transfers_max},
                                                {"connections", options.connections, 1, kLanesMax},
                                                {"local_connections", options.local_connections, 1, kLanesMax},
                                                {"segment_bytes", options.segment_bytes, 4096, tcp::kPayloadMax},
                                                {"window_bytes", options.window_bytes},
                                                {"spin_ns", options.spin_ns, 0},
                                                {"silence_ns", options.silence_ns, kMillisecond}}));
  auto backend = std::make_unique<tcp::TcpBackend>(options);
  KVFERRY_TRY(backend->start());
  return std::unique_ptr<Transport>(std::make_unique<BackendTransport>(std::move(backend)));
}

}  // namespace kvferry
