// The TCP backend: listens, and owns all connections and links of one transport.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/backend.h"
#include "transport/base/clock.h"
#include "transport/base/net/spare_fd.h"
#include "transport/make_transport.h"
#include "transport/progress_loop.h"
#include "transport/tcp/acceptor.h"
#include "transport/tcp/connection.h"
#include "transport/tcp/inbound_link.h"
#include "transport/tcp/outbound_link.h"

namespace kvferry::tcp {

/// Threads: Backend says which threads may call its methods. Methods that Backend does not declare run under the loop's
/// lock, except start().
class TcpBackend final : public Backend, public ProgressLoop::Owner {
 public:
  explicit TcpBackend(const TcpOptions& options);
  /// Listens and starts the loop's thread. Errors: those of net::listen_in_range() and net::listen_tcp().
  Result<void> start();

  // Methods of Backend
  std::string address() const override { return address_; }
  std::string describe() const override;
  Result<std::uint64_t> check_address(const std::string& address) override;
  void post(Task task) override { loop_.call(std::move(task)); }
  void join() override { loop_.stop(); }
  bool wait(TimeNs timeout_ns) override;
  void set_wait_interrupt_fd(int fd) override;
  Result<RegionKey> open_region(RegionId id, const MemoryRegion& memory) override;
  void add_peer(PeerId peer, const std::string& address) override;
  void drop_peer(PeerId peer) override;
  void submit(AcceptedTransfer transfer) override;
  void feed(FedCopies more) override;
  void cancel(PeerId peer, TransferId id) override;
  void stop() override;

  // Methods for the acceptor and the links
  using Backend::random_number;
  TransferTable& transfer_table() { return table_; }
  const TcpOptions& options() const { return options_; }
  /// Returns Notification::from of the notifications that this node sends.
  const std::string& source_address() const { return source_address_; }
  TimeNs now() const { return clock_.now(); }
  /// Makes a connection of the socket, whose events the loop passes to on_ready() from now on.
  Connection& adopt(OwnedFd socket, MessageHandler& handler, bool is_connecting);
  /// Queues the connection for the next advance().
  void wake(Connection& connection);
  /// Closes the connection. The object stays valid until the next advance().
  void close(Connection& connection);
  /// Schedules a call of check(), unless one is scheduled. Called when a peer's answer, Hello or rest of a message is
  /// awaited.
  void arm_silence_check();

  // Methods of ProgressLoop::Owner
  void on_ready(std::uint64_t tag, std::uint32_t events) override;
  bool advance(TimeNs now) override;
  TimeNs next_deadline() const override { return std::min(check_at_, key_check_at_); }
  void set_spinning(bool) override {}
  bool needs_advance() const override { return !ready_.empty() || is_timer_new_; }

 private:
  void accept_all();
  /// Adds an accepted connection to the link that its hello names, or closes the connection if the link is full.
  void welcome(Connection& connection, const Hello& hello);
  /// Removes a link that has ended and has no open connection.
  void drop_inbound(std::uint64_t link);
  /// Ends connections whose key is not accepted any more, and renews idle links whose key is not in use any more.
  void follow_key(TimeNs now);
  /// Ends connections and links that have been silent for too long.
  void check(TimeNs now);

  const TcpOptions options_;
  const std::string secret_;
  const std::unique_ptr<const net::TlsContext> tls_;  // TLS of connections; null: there is no cluster key
  std::string address_;
  std::vector<Endpoint> endpoints_;
  OwnedFd listener_;
  net::SpareFd spare_;
  std::uint64_t num_refused_ = 0;    // connections refused because of kConnectionsMax
  std::uint64_t num_unwatched_ = 0;  // connections that epoll could not watch

  std::uint64_t num_connections_made_ = 0;
  std::unordered_map<std::uint64_t, std::unique_ptr<Connection>> connections_;
  std::unordered_map<PeerId, std::unique_ptr<OutboundLink>> outbound_;
  std::unordered_map<std::uint64_t, std::unique_ptr<InboundLink>> inbound_;
  Acceptor acceptor_;
  // Closed objects. Their methods may still be running, so the next advance() frees the objects.
  std::vector<std::unique_ptr<Connection>> closed_connections_;
  std::vector<std::unique_ptr<MessageHandler>> closed_links_;

  std::vector<std::uint64_t> ready_;  // ids of connections that have work to do
  std::vector<std::uint64_t> turn_;   // ids of connections that the current advance() serves
  TimeNs check_at_ = ProgressLoop::kNever;
  TimeNs key_check_at_ = ProgressLoop::kNever;  // when to look at the cluster key again; kNever: it can't change
  std::uint64_t key_version_ = 0;
  bool is_renewing_ = false;   // whether a link may have connections with a key that is not in use any more
  bool is_timer_new_ = false;  // whether check_at_ has changed since the last advance()
  ProgressLoop loop_;          // last member, so that its thread, which uses all others, ends first
};

}  // namespace kvferry::tcp
