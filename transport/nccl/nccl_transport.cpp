// The side of the NCCL transport that any thread may call: checks, books, and tasks for the progress thread.
#include "transport/nccl/nccl_transport.h"

#include <mutex>
#include <unordered_map>
#include <utility>

#include "transport/base/check.h"
#include "transport/transfer_table.h"
#include "transport/nccl/engine.h"
#include "transport/nccl/nccl_library.h"

namespace kvferry {
namespace nccl {
namespace {

class NcclTransport final : public Transport {
 public:
  NcclTransport(const NcclOptions& options, std::unique_ptr<Communicators> communicators,
                std::unique_ptr<ControlPlane> control)
      : device_(*options.device),
        incarnation_(TransferTable::random_incarnation()),
        table_(options.transfers_max),
        engine_(options, table_, std::move(communicators), std::move(control)),
        address_(encode(Address{kProtocolVersion, incarnation_, engine_.control_address()})) {
    engine_.set_source_address(address_);
    engine_.start();
  }
  ~NcclTransport() override {
    shutdown();
    for (const auto& [region, memory] : pinned_) device_.unpin(memory);
  }

  std::string address() const override { return address_; }
  std::string describe() const override { return engine_.describe(); }

  Result<RegionId> register_region(const MemoryRegion& memory) override {
    if (Result<void> ok = TransferTable::check_region(memory.base, memory.bytes); !ok) return std::move(ok).error();
    if (memory.device != nullptr && memory.device != &device_)
      return Error{ErrorCode::kUnavailable,
                   fmt::format("memory of {} can't be reached by {}", memory.device->describe(), device_.describe())};
    const std::lock_guard lock(mutex_);
    if (is_stopped_) return TransferTable::is_shut_down();
    const RegionId id = table_.new_region_id();
    if (memory.device == nullptr) {
      const std::span<std::byte> host(static_cast<std::byte*>(memory.base), memory.bytes);
      if (Result<void> ok = device_.pin(host); !ok) return std::move(ok).error().with("pinning memory for NCCL");
      pinned_.emplace(id, host);
    }
    const RegionDescriptor descriptor{.incarnation = incarnation_,
                                      .base = reinterpret_cast<std::uintptr_t>(memory.base),
                                      .bytes = memory.bytes,
                                      .rkey = "",
                                      .region = id.value};
    table_.add_region(id, memory.base, memory.bytes, encode(descriptor));
    return id;
  }
  Result<std::string> export_region(RegionId region) const override { return table_.exported(region); }
  Result<void> unregister_region(RegionId region) override {
    const std::lock_guard lock(mutex_);
    if (Result<void> ok = table_.remove_region(region); !ok) return ok;
    if (const auto pinned = pinned_.extract(region)) device_.unpin(pinned.mapped());
    return {};
  }

  Result<GrantId> grant(RegionId region, std::uint64_t offset, std::uint64_t bytes) override {
    return table_.add_grant(region, offset, bytes, "");
  }
  Result<std::string> export_grant(GrantId grant) const override { return table_.exported(grant); }
  Result<void> revoke(GrantId grant) override { return table_.remove_grant(grant); }

  Result<PeerId> connect(const std::string& address) override {
    Result<Address> parsed = decode<Address>(address, "peer address");
    if (!parsed) return Error{ErrorCode::kInvalidArgument, std::move(parsed.error().what)};
    if (parsed->protocol_version != kProtocolVersion)
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("the peer address is of transport protocol {}; this side speaks {}",
                               parsed->protocol_version, kProtocolVersion)};
    const std::lock_guard lock(mutex_);
    if (is_stopped_) return TransferTable::is_shut_down();
    const TransferTable::Connected connected = table_.connect(address, parsed->incarnation);
    if (connected.is_new)
      engine_.post([this, peer = connected.peer, to = std::move(*parsed)] { engine_.add_peer(peer, to); });
    return connected.peer;
  }
  void disconnect(PeerId peer) override {
    const std::lock_guard lock(mutex_);
    if (!is_stopped_ && table_.forget_peer(peer)) engine_.post([this, peer] { engine_.drop_peer(peer); });
  }

  Result<TransferId> submit(PagedTransfer transfer) override {
    const std::lock_guard lock(mutex_);
    if (is_stopped_) return TransferTable::is_shut_down();
    Result<AcceptedTransfer> accepted = table_.accept(std::move(transfer));
    if (!accepted) return std::move(accepted).error();
    const TransferId id = accepted->id;
    engine_.post([this, one = std::move(*accepted)]() mutable { engine_.submit(std::move(one)); });
    return id;
  }
  Result<void> feed(TransferId id, std::vector<CopyRange> ranges, std::vector<std::uint64_t> checksums,
                    bool is_last) override {
    const std::lock_guard lock(mutex_);
    Result<FedCopies> fed = table_.feed(id, ranges, std::move(checksums), is_last);
    if (!fed) return std::move(fed).error();
    if (!is_stopped_) engine_.post([this, id, more = std::move(*fed)]() mutable { engine_.feed(id, std::move(more)); });
    return {};
  }
  void cancel(TransferId id) override {
    const std::lock_guard lock(mutex_);
    if (!is_stopped_ && table_.request_cancel(id)) engine_.post([this, id] { engine_.cancel(id); });
  }

  std::vector<Completion> poll() override { return table_.completion_queue().take_completions(); }
  std::vector<Notification> poll_notifications() override { return table_.completion_queue().take_notifications(); }
  int event_fd() const override { return table_.completion_queue().event_fd(); }

  void set_source_address(const std::string& address) override {
    const std::lock_guard lock(mutex_);
    if (!is_stopped_) engine_.post([this, address] { engine_.set_source_address(address); });
  }

  void shutdown() override {
    const std::lock_guard joining(join_mutex_);  // so that a second caller, too, returns only when the thread has ended
    {
      const std::lock_guard lock(mutex_);
      if (!std::exchange(is_stopped_, true)) engine_.post([this] { engine_.stop(); });
    }
    engine_.join();
    KVFERRY_CHECK(table_.num_open() == 0, "{} transfers were shut down without a completion", table_.num_open());
  }

 private:
  Device& device_;
  const std::uint64_t incarnation_;
  TransferTable table_;
  Engine engine_;  // after the transfer_table, which it refers to
  const std::string address_;
  std::mutex join_mutex_;
  std::mutex mutex_;  // keeps the order of tasks that of the books, and the stop last
  std::unordered_map<RegionId, std::span<std::byte>> pinned_;
  bool is_stopped_ = false;
};

Result<void> check_options(const NcclOptions& options) {
  const auto bad = [](std::string what) { return Error{ErrorCode::kInvalidArgument, "bad NcclOptions: " + what}; };
  constexpr std::uint32_t kPiecesMax = kServedMax / 2;
  if (options.device == nullptr) return bad("a device is needed");
  if (options.transfers_max == 0) return bad("transfers_max must be at least 1");
  if (options.piece_bytes == 0 || options.piece_bytes > kPieceBytesMax)
    return bad(fmt::format("piece_bytes is {}, and 1 to {} are allowed", options.piece_bytes, kPieceBytesMax));
  if (options.pieces_per_peer_max == 0 || options.pieces_per_peer_max > kPiecesMax)
    return bad(
        fmt::format("pieces_per_peer_max is {}, and 1 to {} are allowed", options.pieces_per_peer_max, kPiecesMax));
  if (options.spin_ns < 0 || options.silence_ns < kMillisecond || options.stuck_ns <= 0 || options.hung_ns <= 0)
    return bad("spin_ns must be at least 0, silence_ns at least one millisecond, stuck_ns and hung_ns at least 1");
  return {};
}

}  // namespace

Result<std::unique_ptr<Transport>> make_transport_over(std::unique_ptr<Communicators> communicators,
                                                       const NcclOptions& options) {
  if (Result<void> ok = check_options(options); !ok) return std::move(ok).error();
  TcpOptions control = options.control;
  control.silence_ns = options.silence_ns;
  control.spin_ns = options.spin_ns;
  Result<std::unique_ptr<ControlPlane>> plane = ControlPlane::open(control);
  if (!plane) return std::move(plane).error();
  return std::unique_ptr<Transport>(
      std::make_unique<NcclTransport>(options, std::move(communicators), std::move(*plane)));
}

}  // namespace nccl

Result<std::unique_ptr<Transport>> make_nccl_transport(const NcclOptions& options) {
  if (Result<void> ok = nccl::check_options(options); !ok) return std::move(ok).error();
  Result<std::unique_ptr<nccl::Communicators>> communicators = nccl::open_nccl(options.library, *options.device);
  if (!communicators) return std::move(communicators).error();
  return nccl::make_transport_over(std::move(*communicators), options);
}

}  // namespace kvferry
