// The side of the TCP transport that any thread may call: checks, books, and tasks for the loop.
#include <atomic>
#include <mutex>
#include <utility>

#include "transport/transfer_table.h"
#include "transport/make_transport.h"
#include "transport/tcp/engine.h"

namespace kvferry {
namespace {

class TcpTransport final : public Transport {
 public:
  TcpTransport(const TcpOptions& options, std::uint64_t incarnation)
      : incarnation_(incarnation), table_(options.transfers_max), engine_(options, incarnation, table_) {}
  ~TcpTransport() override { shutdown(); }

  Result<void> start() { return engine_.start(); }

  std::string address() const override { return engine_.address(); }

  std::string describe() const override {
    const tcp::Endpoint& first = engine_.endpoints().front();
    return fmt::format(
        "TCP sockets carry the bytes, up to {} to a peer on another host; this side listens on {} port {}",
        engine_.options().connections, first.host, first.port);
  }

  Result<RegionId> register_region(const MemoryRegion& memory) override {
    if (Result<void> ok = TransferTable::check_host_region(memory, "TCP"); !ok) return std::move(ok).error();
    if (is_stopped_) return TransferTable::is_shut_down();
    const RegionId id = table_.new_region_id();
    const RegionDescriptor descriptor{.incarnation = incarnation_,
                                      .base = reinterpret_cast<std::uintptr_t>(memory.base),
                                      .bytes = memory.bytes,
                                      .rkey = "",
                                      .region = id.value};
    table_.add_region(id, memory.base, memory.bytes, encode(descriptor));
    return id;
  }
  Result<std::string> export_region(RegionId region) const override { return table_.exported(region); }
  Result<void> unregister_region(RegionId region) override { return table_.remove_region(region); }

  Result<GrantId> grant(RegionId region, std::uint64_t offset, std::uint64_t bytes) override {
    return table_.add_grant(region, offset, bytes, "");
  }
  Result<std::string> export_grant(GrantId grant) const override { return table_.exported(grant); }
  Result<void> revoke(GrantId grant) override { return table_.remove_grant(grant); }

  Result<PeerId> connect(const std::string& address) override {
    Result<tcp::Address> parsed = decode<tcp::Address>(address, "peer address");
    if (!parsed) return Error{ErrorCode::kInvalidArgument, std::move(parsed.error().what)};
    if (parsed->protocol_version != tcp::kProtocolVersion)
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("the peer address is of transport protocol {}; this side speaks {}",
                               parsed->protocol_version, tcp::kProtocolVersion)};
    const std::lock_guard lock(order_mutex_);
    if (is_stopped_) return TransferTable::is_shut_down();
    const TransferTable::Connected connected = table_.connect(address, parsed->incarnation);
    if (connected.is_new)
      engine_.post([this, peer = connected.peer, to = std::move(*parsed)] { engine_.add_peer(peer, to); });
    return connected.peer;
  }

  void disconnect(PeerId peer) override {
    const std::lock_guard lock(order_mutex_);
    if (!is_stopped_ && table_.forget_peer(peer)) engine_.post([this, peer] { engine_.drop_peer(peer); });
  }

  Result<TransferId> submit(PagedTransfer transfer) override {
    const std::lock_guard lock(order_mutex_);
    if (is_stopped_) return TransferTable::is_shut_down();
    Result<AcceptedTransfer> accepted = table_.accept(std::move(transfer));
    if (!accepted) return std::move(accepted).error();
    const TransferId id = accepted->id;
    engine_.post([this, one = std::move(*accepted)]() mutable { engine_.submit(std::move(one)); });
    return id;
  }

  Result<void> feed(TransferId id, std::vector<CopyRange> ranges, std::vector<std::uint64_t> checksums,
                    bool is_last) override {
    const std::lock_guard lock(order_mutex_);
    Result<FedCopies> fed = table_.feed(id, ranges, std::move(checksums), is_last);
    if (!fed) return std::move(fed).error();
    engine_.post([this, id, more = std::move(*fed)]() mutable { engine_.feed(id, std::move(more)); });
    return {};
  }

  void cancel(TransferId id) override {
    const std::lock_guard lock(order_mutex_);
    if (!is_stopped_ && table_.request_cancel(id)) engine_.post([this, id] { engine_.cancel(id); });
  }

  std::vector<Completion> poll() override { return table_.completion_queue().take_completions(); }
  std::vector<Notification> poll_notifications() override { return table_.completion_queue().take_notifications(); }
  int event_fd() const override { return table_.completion_queue().event_fd(); }

  bool wait(TimeNs timeout_ns) override {
    const std::optional<bool> driven =
        engine_.loop().drive(timeout_ns, [this] { return table_.completion_queue().has_something(); });
    return driven ? *driven : Transport::wait(timeout_ns);
  }

  bool set_wait_interrupt_fd(int fd) override {
    engine_.loop().add_wakeup_fd(fd);
    return true;
  }
  void set_source_address(const std::string& address) override {
    engine_.loop().call_and_wait([&] { engine_.set_source_address(address); });
  }

  void shutdown() override {
    const std::lock_guard lock(shutdown_mutex_);  // a second caller, too, returns only when the thread has ended
    {
      const std::lock_guard order(order_mutex_);
      if (is_stopped_.exchange(true)) return;
    }
    engine_.loop().call_and_wait([this] { engine_.shut_down(); });
    engine_.loop().stop();
  }

 private:
  const std::uint64_t incarnation_;
  TransferTable table_;
  tcp::Engine engine_;  // after the transfer_table, which it refers to
  std::mutex shutdown_mutex_;
  std::mutex order_mutex_;  // keeps the order of tasks that of the books, and the shutdown last
  std::atomic<bool> is_stopped_{false};
};

Result<void> check_options(const TcpOptions& options) {
  const auto bad = [](std::string what) { return Error{ErrorCode::kInvalidArgument, "bad TcpOptions: " + what}; };
  if (options.transfers_max == 0) return bad("transfers_max must be at least 1");
  for (const std::uint32_t count : {options.connections, options.local_connections}) {
    if (count == 0 || count > tcp::InboundLink::kLanesMax)
      return bad(fmt::format("connections is {}, and 1 to {} are allowed", count, tcp::InboundLink::kLanesMax));
  }
  if (options.segment_bytes < 4096 || options.segment_bytes > tcp::kPayloadMax)
    return bad(fmt::format("segment_bytes is {}, and 4096 to {} are allowed", options.segment_bytes, tcp::kPayloadMax));
  if (options.window_bytes == 0) return bad("window_bytes must be at least 1");
  if (options.spin_ns < 0 || options.silence_ns < kMillisecond)
    return bad("spin_ns must be at least 0 and silence_ns at least one millisecond");
  return {};
}

}  // namespace

Result<std::unique_ptr<Transport>> make_tcp_transport(const TcpOptions& options) {
  if (Result<void> ok = check_options(options); !ok) return std::move(ok).error();
  auto transport = std::make_unique<TcpTransport>(options, TransferTable::random_incarnation());
  if (Result<void> ok = transport->start(); !ok) return std::move(ok).error();
  return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace kvferry
