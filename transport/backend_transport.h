// The part of a transport that all backends share: checks, bookkeeping, the order of calls, shutdown.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/backend.h"
#include "transport/transport.h"

namespace kvferry {

class BackendTransport final : public Transport {
 public:
  /// The progress thread of `backend` must be running already.
  explicit BackendTransport(std::unique_ptr<Backend> backend) : backend_(std::move(backend)) {}
  ~BackendTransport() override { shutdown(); }

  std::string address() const override { return backend_->address(); }
  std::string describe() const override { return backend_->describe(); }

  Result<RegionId> register_region(const MemoryRegion& memory) override;
  Result<std::string> export_region(RegionId region) const override { return table().exported(region); }
  Result<void> unregister_region(RegionId region) override;
  using Transport::grant;
  Result<GrantId> grant(RegionId region, std::uint64_t offset, std::uint64_t bytes, const GrantTerms& terms) override;
  Result<std::string> export_grant(GrantId grant) const override { return table().exported(grant); }
  Result<void> revoke(GrantId grant) override;

  Result<PeerId> connect(const std::string& address) override;
  void disconnect(PeerId peer) override;
  Result<TransferId> submit(PagedTransfer transfer) override;
  Result<void> feed(TransferId id, std::vector<CopyRange> ranges, std::vector<std::uint64_t> checksums,
                    bool is_last) override;
  void cancel(TransferId id) override;

  std::vector<Completion> poll() override { return table().completion_queue().take_completions(); }
  std::vector<Notification> poll_notifications() override { return table().completion_queue().take_notifications(); }
  int event_fd() const override { return table().completion_queue().event_fd(); }
  bool wait(TimeNs timeout_ns) override {
    return table().completion_queue().has_something() || backend_->wait(timeout_ns);
  }
  void set_wait_interrupt_fd(int fd) override { backend_->set_wait_interrupt_fd(fd); }
  std::uint64_t num_refused() const override { return table().num_refused(); }
  void set_source_address(const std::string& address) override;

  void shutdown() override;

 private:
  TransferTable& table() const { return backend_->table(); }

  const std::unique_ptr<Backend> backend_;
  std::mutex memory_mutex_;  // guards regions, grants and shutdown(); locked before order_mutex_
  std::mutex order_mutex_;   // keeps tasks in the order of the transfer table's changes; the last task calls stop()
  bool is_stopped_ = false;  // changes only while both mutexes are locked
};

}  // namespace kvferry
