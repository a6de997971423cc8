// Fixtures whose remotes are separate processes (remote_process.cpp) with a shared segment as their memory.
#pragma once

#include <string>

#include "tests/transport/backends.h"
#include "tests/transport/transport_fixture.h"

namespace kvferry {

/// `backend`: a name of tests/transport/backends.h.
std::unique_ptr<Remote> make_remote_process(const std::string& backend, std::uint64_t bytes);

/// `Backend`: a struct of tests/transport/backends.h.
template <class Backend>
class ProcessFixture final : public Fixture {
 public:
  static std::string name() { return std::string(Backend::kName); }
  std::unique_ptr<Transport> make_transport(std::uint32_t transfers_max) override {
    return Backend::make(transfers_max);
  }
  std::unique_ptr<Remote> make_remote(std::uint64_t bytes) override { return make_remote_process(name(), bytes); }
  bool needs_running_remote() const override { return Backend::kNeedsRunningRemote; }
  bool enforces_unregister() const override { return Backend::kEnforcesUnregister; }
  bool has_grants() const override { return Backend::kHasGrants; }
};

using TcpFixture = ProcessFixture<TcpBackend>;
using UcxFixture = ProcessFixture<UcxBackend>;

}  // namespace kvferry
