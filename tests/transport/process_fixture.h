// Fixtures whose remotes are processes of their own (remote_process.cpp) with a shared segment as their memory.
#pragma once

#include <string>

#include "tests/transport/backends.h"
#include "tests/transport/transport_fixture.h"

namespace kvferry {

/// `backend`: a name of tests/transport/backends.h.
std::unique_ptr<Remote> make_remote_process(const std::string& backend, std::uint64_t bytes);

/// `Backend` says what its transports can and can't do.
template <class Backend>
class ProcessFixture final : public Fixture {
 public:
  static std::string name() { return Backend::kName; }
  std::unique_ptr<Transport> make_transport(std::uint32_t transfers_max) override {
    return make_backend(Backend::kName, transfers_max);
  }
  std::unique_ptr<Remote> make_remote(std::uint64_t bytes) override {
    return make_remote_process(Backend::kName, bytes);
  }
  bool needs_running_remote() const override { return Backend::kNeedsRunningRemote; }
  bool enforces_unregister() const override { return Backend::kEnforcesUnregister; }
  bool lends_grants() const override { return Backend::kLendsGrants; }
};

struct TcpBackend {
  static constexpr const char* kName = "tcp";
  static constexpr bool kNeedsRunningRemote = true;
  static constexpr bool kEnforcesUnregister = true;
  static constexpr bool kLendsGrants = true;
};
struct UcxPackedBackend : TcpBackend {
  static constexpr const char* kName = "ucx_packed";
};
/// One-sided operations by an old descriptor reach the memory without asking anybody there; grants have none.
struct UcxBackend : TcpBackend {
  static constexpr const char* kName = "ucx_one_sided";
  static constexpr bool kEnforcesUnregister = false;
};
/// The same with memory of a simulated GPU, which no processor of UCX's touches.
struct UcxDeviceBackend : UcxBackend {
  static constexpr const char* kName = "ucx_device";
  static constexpr bool kLendsGrants = false;
};
/// NCCL, simulated on simulated GPUs.
struct NcclBackend : TcpBackend {
  static constexpr const char* kName = "nccl_sim";
};
/// One copy by the side that submits: what the remote's process does in the meantime does not matter.
struct ShmBackend : TcpBackend {
  static constexpr const char* kName = "shm";
  static constexpr bool kNeedsRunningRemote = false;
};
/// Simulated GPUs that reach each other's memory.
struct GpuIpcBackend : ShmBackend {
  static constexpr const char* kName = "gpu_ipc_sim";
  static constexpr bool kEnforcesUnregister = false;
  static constexpr bool kLendsGrants = false;
};
struct CmaBackend : ShmBackend {
  static constexpr const char* kName = "cma";
};
/// What the planner picks between two processes of one host.
struct AutoBackend : ShmBackend {
  static constexpr const char* kName = "auto";
};

using TcpFixture = ProcessFixture<TcpBackend>;
using UcxFixture = ProcessFixture<UcxBackend>;
using UcxPackedFixture = ProcessFixture<UcxPackedBackend>;
using UcxDeviceFixture = ProcessFixture<UcxDeviceBackend>;
using GpuIpcFixture = ProcessFixture<GpuIpcBackend>;
using NcclFixture = ProcessFixture<NcclBackend>;
using ShmFixture = ProcessFixture<ShmBackend>;
using CmaFixture = ProcessFixture<CmaBackend>;
using AutoFixture = ProcessFixture<AutoBackend>;

}  // namespace kvferry
