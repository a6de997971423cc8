#pragma once

#include "tests/transport/loopback/loopback_fabric.h"
#include "tests/transport/transport_fixture.h"

namespace kvferry {

class LoopbackFixture final : public Fixture {
 public:
  static std::string name() { return "loopback"; }
  std::unique_ptr<Transport> make_transport(std::uint32_t transfers_max) override;
  std::unique_ptr<Remote> make_remote(std::uint64_t bytes) override;
  bool notices_silence() const override { return false; }  // the loopback fabric has no clock

 private:
  LoopbackFabric fabric_;
};

}  // namespace kvferry
