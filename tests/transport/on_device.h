// A transport that pretends that all its memory belongs to a simulated GPU.
#pragma once

#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/device/sim_device.h"
#include "transport/transport.h"

namespace kvferry {

/// Marks each registered region as the GPU's memory. Other processes may open regions with a descriptor.
class OnDevice final : public Transport {
 public:
  OnDevice(std::unique_ptr<Transport> transport, SimDevice& device)
      : transport_(std::move(transport)), device_(device) {}

  Result<RegionId> register_region(const MemoryRegion& memory) override {
    MemoryRegion on_device{.base = memory.base, .bytes = memory.bytes, .device = &device_};
    if (memory.fd >= 0)
      device_.share({static_cast<std::byte*>(memory.base), memory.bytes},
                    fmt::format("/proc/{}/fd/{}", ::getpid(), memory.fd));
    return transport_->register_region(on_device);
  }

  std::string address() const override { return transport_->address(); }
  std::string describe() const override { return transport_->describe(); }
  Result<std::string> export_region(RegionId region) const override { return transport_->export_region(region); }
  Result<void> unregister_region(RegionId region) override { return transport_->unregister_region(region); }
  using Transport::grant;
  Result<GrantId> grant(RegionId region, std::uint64_t offset, std::uint64_t bytes, const GrantTerms& terms) override {
    return transport_->grant(region, offset, bytes, terms);
  }
  Result<std::string> export_grant(GrantId grant) const override { return transport_->export_grant(grant); }
  Result<void> revoke(GrantId grant) override { return transport_->revoke(grant); }
  Result<PeerId> connect(const std::string& address) override { return transport_->connect(address); }
  void disconnect(PeerId peer) override { transport_->disconnect(peer); }
  Result<TransferId> submit(PagedTransfer transfer) override { return transport_->submit(std::move(transfer)); }
  Result<void> feed(TransferId id, std::vector<CopyRange> ranges, std::vector<std::uint64_t> checksums,
                    bool is_last) override {
    return transport_->feed(id, std::move(ranges), std::move(checksums), is_last);
  }
  void cancel(TransferId id) override { transport_->cancel(id); }
  std::vector<Completion> poll() override { return transport_->poll(); }
  std::vector<Notification> poll_notifications() override { return transport_->poll_notifications(); }
  int event_fd() const override { return transport_->event_fd(); }
  bool wait(TimeNs timeout_ns) override { return transport_->wait(timeout_ns); }
  void set_wait_interrupt_fd(int fd) override { transport_->set_wait_interrupt_fd(fd); }
  void set_source_address(const std::string& address) override { transport_->set_source_address(address); }
  void shutdown() override { transport_->shutdown(); }

 private:
  const std::unique_ptr<Transport> transport_;
  SimDevice& device_;
};

}  // namespace kvferry
