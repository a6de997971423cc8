// Fixtures whose remotes are processes of their own (remote_process.cpp) with a shared segment as their memory.
#pragma once

#include <string>

#include "tests/transport/transport_fixture.h"

namespace kvferry {

/// `backend`: a name of tests/transport/backends.h.
std::unique_ptr<Remote> make_remote_process(const std::string& backend, std::uint64_t bytes);

class UcxFixture : public Fixture {
 public:
  static std::string name() { return "ucx_one_sided"; }
  std::unique_ptr<Transport> make_transport(std::uint32_t transfers_max) override;
  std::unique_ptr<Remote> make_remote(std::uint64_t bytes) override;
  // One-sided operations by an old descriptor reach the memory without asking anybody there; grants have none.
  bool enforces_unregister() const override { return false; }

 protected:
  std::string backend_ = name();
};

class UcxPackedFixture final : public UcxFixture {
 public:
  UcxPackedFixture() { backend_ = name(); }
  static std::string name() { return "ucx_packed"; }
  bool enforces_unregister() const override { return true; }
};

}  // namespace kvferry
