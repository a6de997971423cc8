// The side of the GPU memory transport that any thread may call: checks, books, and tasks for the progress thread.
#include <mutex>
#include <unordered_map>
#include <utility>

#include "transport/base/check.h"
#include "transport/gpu_ipc/engine.h"

namespace kvferry {
namespace gpu_ipc {
namespace {

constexpr std::uint32_t kProtocolVersion = 1;

struct Address {
  std::uint32_t protocol_version = 0;
  std::uint64_t incarnation = 0;
  std::string control;         // the control link's address
  std::string control_region;  // what transfers without ranges name
  KVFERRY_FIELDS(protocol_version, incarnation, control, control_region);
};

class GpuIpcTransport final : public Transport {
 public:
  GpuIpcTransport(const GpuIpcOptions& options, DeviceStream stream, std::unique_ptr<Transport> control)
      : device_(*options.device),
        incarnation_(TransferTable::random_incarnation()),
        table_(options.transfers_max),
        control_(std::move(control)),
        control_region_(control_->register_region(&control_memory_, sizeof(control_memory_)).value()),
        address_(encode(Address{kProtocolVersion, incarnation_, control_->address(),
                                control_->export_region(control_region_).value()})),
        engine_(options, table_, stream, *control_, control_region_) {
    control_->set_source_address(address_);
    engine_.start();
  }
  ~GpuIpcTransport() override { shutdown(); }

  std::string address() const override { return address_; }
  std::string describe() const override {
    return fmt::format("other processes' GPU memory, mapped, copied by {}; control link: {}", device_.describe(),
                       control_->describe());
  }

  Result<RegionId> register_region(const MemoryRegion& memory) override {
    if (Result<void> ok = TransferTable::check_region(memory.base, memory.bytes); !ok) return std::move(ok).error();
    if (memory.device == nullptr)
      return Error{ErrorCode::kUnavailable, "mapped GPU memory moves GPU memory only, and this is the host's"};
    if (memory.device != &device_)
      return Error{ErrorCode::kUnavailable,
                   fmt::format("memory of {} can't be reached by {}", memory.device->describe(), device_.describe())};
    Result<std::string> handle = device_.export_memory({static_cast<const std::byte*>(memory.base), memory.bytes});
    if (!handle) return std::move(handle).error().with("lending GPU memory to other processes");
    const std::lock_guard lock(mutex_);
    if (is_stopped_) return TransferTable::is_shut_down();
    const RegionId id = table_.new_region_id();
    RegionDescriptor descriptor{incarnation_, reinterpret_cast<std::uintptr_t>(memory.base), memory.bytes,
                                std::move(*handle), id.value};
    descriptor.is_device = true;
    table_.add_region(id, memory.base, memory.bytes, encode(descriptor));
    return id;
  }
  Result<std::string> export_region(RegionId region) const override { return table_.exported(region); }
  Result<void> unregister_region(RegionId region) override { return table_.remove_region(region); }

  Result<GrantId> grant(RegionId region, std::uint64_t, std::uint64_t) override {
    if (Result<std::string> known = table_.exported(region); !known) return std::move(known).error();
    return Error{ErrorCode::kUnavailable,
                 fmt::format("region {} is GPU memory that peers map, of which no parts can be lent: they could not be "
                             "taken back",
                             region)};
  }
  Result<std::string> export_grant(GrantId grant) const override { return table_.exported(grant); }
  Result<void> revoke(GrantId grant) override { return table_.remove_grant(grant); }

  Result<PeerId> connect(const std::string& address) override {
    Result<Address> parsed = decode<Address>(address, "peer address");
    if (!parsed) return Error{ErrorCode::kInvalidArgument, std::move(parsed.error().what)};
    if (parsed->protocol_version != kProtocolVersion)
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("the peer address is of GPU memory protocol {}; this side speaks {}",
                               parsed->protocol_version, kProtocolVersion)};
    const std::lock_guard lock(mutex_);
    if (is_stopped_) return TransferTable::is_shut_down();
    Result<PeerId> control = control_->connect(parsed->control);
    if (!control) return std::move(control).error();  // another host, for one
    const TransferTable::Connected connected = table_.connect(address, parsed->incarnation);
    if (connected.is_new) {
      control_peers_[connected.peer] = *control;
      engine_.post([this, peer = connected.peer, on_control = *control, region = std::move(parsed->control_region)] {
        engine_.add_peer(peer, on_control, region);
      });
    }
    return connected.peer;
  }
  void disconnect(PeerId peer) override {
    const std::lock_guard lock(mutex_);
    if (is_stopped_ || !table_.forget_peer(peer)) return;
    control_->disconnect(control_peers_.extract(peer).mapped());  // now: a connect() that follows makes a new one
    engine_.post([this, peer] { engine_.drop_peer(peer); });
  }

  Result<TransferId> submit(PagedTransfer transfer) override {
    const std::lock_guard lock(mutex_);
    if (is_stopped_) return TransferTable::is_shut_down();
    Result<AcceptedTransfer> accepted = table_.accept(std::move(transfer));
    if (!accepted) return std::move(accepted).error();
    const TransferId id = accepted->id;
    // shared, because a std::function must be able to copy what it holds
    engine_.post([this, shared = std::make_shared<AcceptedTransfer>(std::move(*accepted))] {
      engine_.submit(std::move(*shared));
    });
    return id;
  }
  Result<void> feed(TransferId id, std::vector<CopyRange> ranges, std::vector<std::uint64_t> checksums,
                    bool is_last) override {
    const std::lock_guard lock(mutex_);
    Result<FedCopies> fed = table_.feed(id, ranges, std::move(checksums), is_last);
    if (!fed) return std::move(fed).error();
    if (!is_stopped_) engine_.post([this, id, more = std::move(*fed)] { engine_.feed(id, more); });
    return {};
  }
  void cancel(TransferId id) override {
    const std::lock_guard lock(mutex_);
    if (!is_stopped_ && table_.request_cancel(id)) engine_.post([this, id] { engine_.cancel(id); });
  }

  std::vector<Completion> poll() override { return table_.completion_queue().take_completions(); }
  std::vector<Notification> poll_notifications() override { return table_.completion_queue().take_notifications(); }
  int event_fd() const override { return table_.completion_queue().event_fd(); }

  void set_source_address(const std::string& address) override { control_->set_source_address(address); }

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
  std::uint64_t control_memory_ = 0;  // nobody reads it
  const std::unique_ptr<Transport> control_;
  const RegionId control_region_;
  const std::string address_;
  Engine engine_;  // after all that it refers to
  std::mutex join_mutex_;
  std::mutex mutex_;  // keeps the order of tasks that of the books, and the stop last
  std::unordered_map<PeerId, PeerId> control_peers_;
  bool is_stopped_ = false;
};

Result<void> check_options(const GpuIpcOptions& options) {
  const auto bad = [](std::string what) { return Error{ErrorCode::kInvalidArgument, "bad GpuIpcOptions: " + what}; };
  if (options.device == nullptr) return bad("a device is needed");
  if (options.transfers_max == 0 || options.piece_bytes == 0 || options.in_flight_bytes == 0)
    return bad("transfers_max, piece_bytes and in_flight_bytes must be at least 1");
  if (options.spin_ns < 0 || options.silence_ns <= 0) return bad("spin_ns must be at least 0, silence_ns at least 1");
  return {};
}

}  // namespace
}  // namespace gpu_ipc

Result<std::unique_ptr<Transport>> make_gpu_ipc_transport(const GpuIpcOptions& options) {
  if (Result<void> ok = gpu_ipc::check_options(options); !ok) return std::move(ok).error();
  ShmOptions link;
  link.spin_ns = options.spin_ns;
  link.silence_ns = options.silence_ns;
  link.transfers_max = 1 << 20;  // those of the transport and two for each peer
  Result<std::unique_ptr<Transport>> control = make_shm_transport(link);
  if (!control) return std::move(control).error();
  Result<DeviceStream> stream = options.device->make_stream();
  if (!stream) return std::move(stream).error();
  return std::unique_ptr<Transport>(std::make_unique<gpu_ipc::GpuIpcTransport>(options, *stream, std::move(*control)));
}

}  // namespace kvferry
