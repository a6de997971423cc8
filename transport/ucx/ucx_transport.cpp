// The side of the UCX transport that any thread may call: checks, books, and commands for the progress thread.
#include <future>
#include <mutex>
#include <utility>

#include "transport/base/check.h"
#include "transport/transfer_table.h"
#include "transport/make_transport.h"
#include "transport/ucx/progress_engine.h"

namespace kvferry {
namespace {

class UcxTransport final : public Transport {
 public:
  UcxTransport(const UcxOptions& options, std::uint64_t incarnation)
      : incarnation_(incarnation), table_(options.transfers_max) {}
  ~UcxTransport() override { shutdown(); }

  Result<void> start(const UcxOptions& options) {
    Result<std::unique_ptr<ucx::ProgressEngine>> engine = ucx::ProgressEngine::start(options, incarnation_, table_);
    if (!engine) return std::move(engine).error();
    engine_ = std::move(*engine);
    stopped_ = false;
    return {};
  }

  std::string address() const override { return engine_->address(); }

  std::string describe() const override {
    const std::string path = engine_->path();
    return fmt::format("UCX {} carries the bytes over {}", ucp_get_version_string(),
                       path.empty() ? "a transport that it chooses at the first connection" : path);
  }

  Result<RegionId> register_region(const MemoryRegion& memory) override {
    if (Result<void> ok = TransferTable::check_region(memory.base, memory.bytes); !ok) return std::move(ok).error();
    const RegionId id = table_.new_region_id();
    ucx::MapMemoryCommand command{id, memory.base, memory.bytes, memory.device, {}};
    std::future<Result<std::string>> mapped = command.rkey.get_future();
    if (!post(std::move(command))) return TransferTable::is_shut_down();
    Result<std::string> rkey = mapped.get();
    if (!rkey) return std::move(rkey).error();
    RegionDescriptor descriptor{incarnation_, reinterpret_cast<std::uintptr_t>(memory.base), memory.bytes,
                                std::move(*rkey), id.value};
    descriptor.is_device = memory.device != nullptr;
    table_.add_region(id, memory.base, memory.bytes, encode(descriptor));
    return id;
  }

  Result<std::string> export_region(RegionId region) const override { return table_.exported(region); }

  Result<void> unregister_region(RegionId region) override {
    if (Result<void> ok = table_.remove_region(region); !ok) return ok;
    ucx::UnmapMemoryCommand command{region, {}};
    std::future<void> unmapped = command.unmapped.get_future();
    if (post(std::move(command))) unmapped.get();  // else shutdown() unmaps it
    return {};
  }

  Result<GrantId> grant(RegionId region, std::uint64_t offset, std::uint64_t bytes) override {
    if (const Result<std::string> known = table_.exported(region);
        known && decode<RegionDescriptor>(*known, "own descriptor").value().is_device)
      return Error{
          ErrorCode::kUnavailable,
          fmt::format("region {} is GPU memory, of which UCX can lend no parts: it could not take them back", region)};
    return table_.add_grant(region, offset, bytes, "");  // no key: its bytes always go through this side's hands
  }
  Result<std::string> export_grant(GrantId grant) const override { return table_.exported(grant); }
  Result<void> revoke(GrantId grant) override { return table_.remove_grant(grant); }

  Result<PeerId> connect(const std::string& address) override {
    Result<ucx::Address> parsed = decode<ucx::Address>(address, "peer address");
    if (!parsed) return Error{ErrorCode::kInvalidArgument, std::move(parsed.error().what)};
    if (parsed->protocol_version != ucx::kProtocolVersion)
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("the peer address is of transport protocol {}; this side speaks {}",
                               parsed->protocol_version, ucx::kProtocolVersion)};
    const std::lock_guard lock(mutex_);
    if (stopped_) return TransferTable::is_shut_down();
    const TransferTable::Connected connected = table_.connect(address, parsed->incarnation);
    if (connected.is_new) engine_->post(ucx::AddPeerCommand{connected.peer, std::move(*parsed)});
    return connected.peer;
  }

  void disconnect(PeerId peer) override {
    const std::lock_guard lock(mutex_);
    if (!stopped_ && table_.forget_peer(peer)) engine_->post(ucx::DropPeerCommand{peer});
  }

  Result<TransferId> submit(PagedTransfer transfer) override {
    const std::lock_guard lock(mutex_);
    if (stopped_) return TransferTable::is_shut_down();
    Result<AcceptedTransfer> accepted = table_.accept(std::move(transfer));
    if (!accepted) return std::move(accepted).error();
    const TransferId id = accepted->id;
    engine_->post(ucx::SubmitCommand{std::move(*accepted)});
    return id;
  }

  Result<void> feed(TransferId id, std::vector<CopyRange> ranges, std::vector<std::uint64_t> checksums,
                    bool is_last) override {
    const std::lock_guard lock(mutex_);
    Result<FedCopies> fed = table_.feed(id, ranges, std::move(checksums), is_last);
    if (!fed) return std::move(fed).error();
    if (!stopped_) engine_->post(ucx::FeedCommand{id, std::move(*fed)});
    return {};
  }
  void cancel(TransferId id) override {
    const std::lock_guard lock(mutex_);
    if (!stopped_ && table_.request_cancel(id)) engine_->post(ucx::CancelCommand{id});
  }

  std::vector<Completion> poll() override { return table_.completion_queue().take_completions(); }
  std::vector<Notification> poll_notifications() override { return table_.completion_queue().take_notifications(); }
  int event_fd() const override { return table_.completion_queue().event_fd(); }

  void shutdown() override {
    const std::lock_guard joining(join_mutex_);  // so that a second caller, too, returns only when the thread has ended
    {
      const std::lock_guard lock(mutex_);
      if (!std::exchange(stopped_, true)) engine_->post(ucx::StopCommand{});
    }
    if (engine_ != nullptr) engine_->join();
    KVFERRY_CHECK(table_.num_open() == 0, "{} transfers were shut down without a completion", table_.num_open());
  }

 private:
  bool post(ucx::Command command) {
    const std::lock_guard lock(mutex_);
    if (stopped_) return false;
    engine_->post(std::move(command));
    return true;
  }

  const std::uint64_t incarnation_;
  TransferTable table_;
  std::unique_ptr<ucx::ProgressEngine> engine_;  // after the transfer_table, which it refers to
  std::mutex join_mutex_;
  std::mutex mutex_;  // keeps the order of commands that of the books, and StopCommand last
  bool stopped_ = true;
};

Result<void> check_options(const UcxOptions& options) {
  if (options.transfers_max == 0 || options.operations_per_transfer_max == 0 || options.operations_per_peer_max == 0 ||
      options.operation_bytes_max == 0)
    return Error{ErrorCode::kInvalidArgument, "bad UcxOptions: every ..._max must be at least 1"};
  if (options.spin_ns < 0 || options.stuck_ns <= 0 || options.silence_ns <= 0)
    return Error{ErrorCode::kInvalidArgument,
                 "bad UcxOptions: spin_ns must be at least 0, stuck_ns and silence_ns at least 1"};
  return {};
}

}  // namespace

Result<std::unique_ptr<Transport>> make_ucx_transport(const UcxOptions& options) {
  if (Result<void> ok = check_options(options); !ok) return std::move(ok).error();
  auto transport = std::make_unique<UcxTransport>(options, TransferTable::random_incarnation());
  if (Result<void> ok = transport->start(options); !ok) return std::move(ok).error();
  return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace kvferry
