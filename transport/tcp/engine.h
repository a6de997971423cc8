// What the loop runs: listens, greets, and looks after all connections and links of one transport.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/base/clock.h"
#include "transport/transfer_table.h"
#include "transport/make_transport.h"
#include "transport/progress_loop.h"
#include "transport/tcp/connection.h"
#include "transport/tcp/acceptor.h"
#include "transport/tcp/inbound_link.h"
#include "transport/tcp/outbound_link.h"

namespace kvferry::tcp {

/// Everything but the constructor, start() and post() is called in the loop.
class Engine final : public ProgressLoop::Owner, public LinkHost {
 public:
  Engine(const TcpOptions& options, std::uint64_t incarnation, TransferTable& transfer_table);

  /// Listens and starts the loop's thread.
  Result<void> start();
  const std::string& address() const { return address_; }
  void set_source_address(const std::string& address) { signature_ = address; }
  const std::vector<Endpoint>& endpoints() const { return endpoints_; }
  ProgressLoop& loop() { return loop_; }

  /// Any thread: runs it in the loop, and wakes the progress thread for what it leaves to do.
  template <class Task>
  void post(Task task) {
    loop_.call([this, task = std::move(task)]() mutable {
      task();
      if (!ready_.empty() || std::exchange(is_timer_new_, false)) loop_.kick();
    });
  }

  void add_peer(PeerId peer, Address address);
  void drop_peer(PeerId peer);
  void submit(AcceptedTransfer transfer);
  void feed(TransferId id, FedCopies more);
  void cancel(TransferId id);
  /// Ends every transfer; whatever is submitted later ends at once.
  void shut_down();

  // LinkHost
  TransferTable& transfer_table() override { return table_; }
  const TcpOptions& options() const override { return options_; }
  const std::string& signature() const override { return signature_; }
  TimeNs now() const override { return clock_.now(); }
  Connection& adopt(OwnedFd socket, FrameHandler& handler, bool is_connecting) override;
  void wake(Connection& connection) override;
  void close(Connection& connection) override;
  void arm() override;

  // Acceptor
  /// Known as one of `hello.link` from here on.
  void welcome(Connection& connection, const Hello& hello);
  /// An inbound link is over: none of its connections is open any more.
  void drop_inbound(std::uint64_t link);

  // ProgressLoop::Owner
  void on_ready(std::uint64_t tag, std::uint32_t events) override;
  bool advance(TimeNs now) override;
  TimeNs next_deadline() const override { return check_at_; }
  void set_spinning(bool) override {}

 private:
  void accept_all();
  void check(TimeNs now);

  const TcpOptions options_;
  const std::uint64_t incarnation_;
  TransferTable& table_;
  const SteadyClock clock_;
  std::string secret_;
  std::string address_;
  std::string signature_;  // who notifications are from
  std::vector<Endpoint> endpoints_;
  OwnedFd listener_;
  OwnedFd spare_;  // closed for a moment when no descriptor is left, to turn newcomers away
  bool is_shut_down_ = false;

  std::uint64_t num_connections_made_ = 0;
  std::unordered_map<std::uint64_t, std::unique_ptr<Connection>> connections_;
  std::unordered_map<PeerId, std::unique_ptr<OutboundLink>> outbound_;
  std::unordered_map<std::uint64_t, std::unique_ptr<InboundLink>> inbound_;
  Acceptor acceptor_;
  // Closed, but perhaps still in the middle of a call: freed at the next advance().
  std::vector<std::unique_ptr<Connection>> closed_connections_;
  std::vector<std::unique_ptr<FrameHandler>> closed_links_;

  std::vector<std::uint64_t> ready_;
  std::vector<std::uint64_t> turn_;
  TimeNs check_at_ = ProgressLoop::kNever;
  bool is_timer_new_ = false;
  ProgressLoop loop_;  // last: its thread ends first
};

}  // namespace kvferry::tcp
