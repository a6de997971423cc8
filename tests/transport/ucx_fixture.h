#pragma once

#include "tests/transport/transport_fixture.h"

namespace kvferry {

/// Remotes are processes of their own (remote_process.cpp) whose memory is a shared segment.
class UcxFixture final : public Fixture {
 public:
  std::unique_ptr<Transport> make_transport(std::uint32_t transfers_max) override;
  std::unique_ptr<Remote> make_remote(std::uint64_t bytes) override;
};

}  // namespace kvferry
