#include "tests/transport/loopback/loopback_fabric.h"

#include <utility>
#include <vector>

#include "tests/transport/loopback/loopback_core.h"

namespace kvferry {
namespace {

class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(std::shared_ptr<LoopbackCore> core, std::uint32_t transfers_max)
      : core_(std::move(core)), node_(core_->add_node(transfers_max)) {}
  ~LoopbackTransport() override { core_->end(*node_); }

  std::string address() const override { return node_->address; }
  std::string describe() const override { return "loopback: copies within this process"; }

  Result<RegionId> register_region(const MemoryRegion& memory) override {
    KVFERRY_TRY(TransferTable::check_host_region(memory, "the loopback"));
    if (!core_->is_alive(*node_)) return TransferTable::is_shut_down();
    const RegionId id = node_->transfer_table.new_region_id();
    const RegionDescriptor descriptor{node_->incarnation, reinterpret_cast<std::uintptr_t>(memory.base), memory.bytes,
                                      "", id.value};
    node_->transfer_table.add_region(id, memory, encode(descriptor));
    return id;
  }
  Result<std::string> export_region(RegionId region) const override { return node_->transfer_table.exported(region); }
  Result<void> unregister_region(RegionId region) override { return node_->transfer_table.remove_region(region); }
  using Transport::grant;
  Result<GrantId> grant(RegionId region, std::uint64_t offset, std::uint64_t bytes, const GrantTerms& terms) override {
    return node_->transfer_table.add_grant(region, offset, bytes, terms, "");
  }
  Result<std::string> export_grant(GrantId grant) const override { return node_->transfer_table.exported(grant); }
  Result<void> revoke(GrantId grant) override { return node_->transfer_table.remove_grant(grant); }

  Result<PeerId> connect(const std::string& address) override { return core_->connect(*node_, address); }
  void disconnect(PeerId peer) override { core_->disconnect(*node_, peer); }
  Result<TransferId> submit(PagedTransfer transfer) override { return core_->submit(*node_, std::move(transfer)); }
  Result<void> feed(TransferId id, std::vector<CopyRange> ranges, std::vector<std::uint64_t> checksums,
                    bool is_last) override {
    return core_->feed(*node_, id, ranges, std::move(checksums), is_last);
  }
  void cancel(TransferId id) override { core_->cancel(*node_, id); }

  std::vector<Completion> poll() override { return node_->transfer_table.completion_queue().take_completions(); }
  std::vector<Notification> poll_notifications() override {
    return node_->transfer_table.completion_queue().take_notifications();
  }
  int event_fd() const override { return node_->transfer_table.completion_queue().event_fd(); }
  bool wait(TimeNs timeout_ns) override {
    return node_->transfer_table.completion_queue().wait(timeout_ns, interrupt_fds_);
  }
  void set_wait_interrupt_fd(int fd) override { interrupt_fds_.push_back(fd); }
  std::uint64_t num_refused() const override { return node_->transfer_table.num_refused(); }
  void set_source_address(const std::string& address) override { core_->set_source_address(*node_, address); }
  double measured_rate(PeerId /*peer*/, std::string_view /*path*/) const override { return core_->measured_rate(); }
  void shutdown() override { core_->end(*node_); }

 private:
  std::shared_ptr<LoopbackCore> core_;
  std::shared_ptr<LoopbackNode> node_;
  std::vector<int> interrupt_fds_;
};

}  // namespace

LoopbackFabric::LoopbackFabric(LoopbackOptions options) : core_(std::make_shared<LoopbackCore>(options)) {}

std::unique_ptr<Transport> LoopbackFabric::make_transport(std::uint32_t transfers_max) {
  return std::make_unique<LoopbackTransport>(core_, transfers_max);
}

void LoopbackFabric::hold() { core_->hold(); }
void LoopbackFabric::release() { core_->release(); }
bool LoopbackFabric::step() { return core_->step(); }
void LoopbackFabric::kill(const std::string& address) { core_->kill(address); }
void LoopbackFabric::fail_next(std::uint32_t num_transfers) { core_->fail_next(num_transfers); }

}  // namespace kvferry
