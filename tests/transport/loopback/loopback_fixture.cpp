#include "tests/transport/loopback/loopback_fixture.h"

namespace kvferry {
namespace {

class LoopbackRemote final : public Remote {
 public:
  LoopbackRemote(LoopbackFabric& fabric, std::uint64_t bytes)
      : fabric_(fabric), memory_(bytes), transport_(fabric.make_transport()) {
    registered_ = transport_->register_region(memory_.data(), bytes).value();
    region_ = transport_->export_region(registered_).value();
  }
  std::string address() const override { return transport_->address(); }
  std::string region() const override { return region_; }
  std::span<std::byte> memory() override { return memory_; }
  std::vector<Notification> wait_notifications(std::size_t num_notifications) override {
    return kvferry::wait_notifications(*transport_, num_notifications);
  }
  RemoteGrant grant(std::uint64_t offset, std::uint64_t bytes, const GrantTerms& terms) override {
    const GrantId id = transport_->grant(registered_, offset, bytes, terms).value();
    return {id, transport_->export_grant(id).value()};
  }
  ErrorCode revoke(GrantId grant) override { return code_of(transport_->revoke(grant)); }
  ErrorCode unregister() override { return code_of(transport_->unregister_region(registered_)); }
  std::uint64_t num_refused() override { return transport_->num_refused(); }
  void shut_down() override { transport_->shutdown(); }
  void kill() override {
    fabric_.kill(transport_->address());
    fabric_.release();
  }
  void stop() override { fabric_.hold(); }
  void go_on() override { fabric_.release(); }

 private:
  LoopbackFabric& fabric_;
  std::vector<std::byte> memory_;
  std::unique_ptr<Transport> transport_;
  RegionId registered_;
  std::string region_;
};

}  // namespace

std::unique_ptr<Transport> LoopbackFixture::make_transport(std::uint32_t transfers_max) {
  return fabric_.make_transport(transfers_max);
}

std::unique_ptr<Remote> LoopbackFixture::make_remote(std::uint64_t bytes) {
  return std::make_unique<LoopbackRemote>(fabric_, bytes);
}

}  // namespace kvferry
