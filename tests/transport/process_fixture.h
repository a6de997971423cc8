// Fixtures whose remotes are processes of their own (remote_process.cpp) with a shared segment as their memory.
#pragma once

#include <string>

#include "tests/transport/backends.h"
#include "tests/transport/transport_fixture.h"

namespace kvferry {

/// `backend`: a name of tests/transport/backends.h.
std::unique_ptr<Remote> make_remote_process(const std::string& backend, std::uint64_t bytes);

/// One copy by the side that submits: what the remote's process does in the meantime does not matter.
template <bool use_mappings>
class OneSidedFixture final : public Fixture {
 public:
  static std::string name() { return kName; }
  std::unique_ptr<Transport> make_transport(std::uint32_t transfers_max) override {
    return make_backend(kName, transfers_max);
  }
  std::unique_ptr<Remote> make_remote(std::uint64_t bytes) override { return make_remote_process(kName, bytes); }
  bool needs_running_remote() const override { return false; }

 private:
  static constexpr const char* kName = use_mappings ? "shm" : "cma";
};
using ShmFixture = OneSidedFixture<true>;
using CmaFixture = OneSidedFixture<false>;

class UcxFixture final : public Fixture {
 public:
  static std::string name() { return "ucx"; }
  std::unique_ptr<Transport> make_transport(std::uint32_t transfers_max) override;
  std::unique_ptr<Remote> make_remote(std::uint64_t bytes) override;
  // One-sided operations by an old descriptor reach the memory without asking anybody there.
  bool enforces_revoke() const override { return false; }
};

}  // namespace kvferry
