// The backends of the transport's tests: how each backend is made, and what it can't do. A new backend needs a struct
// here.
#pragma once

#include <memory>
#include <string_view>
#include <tuple>

#include "tests/transport/on_device.h"
#include "tests/transport/sim_communicators.h"
#include "tests/transport/ucx_over_tcp.h"
#include "transport/base/check.h"
#include "transport/make_transport.h"
#include "transport/nccl/communicators.h"

namespace kvferry {

struct TcpBackend {
  static constexpr std::string_view kName = "tcp";
  static constexpr bool kNeedsRunningRemote = true;  // while a remote process is stopped, transfers with it stop too
  static constexpr bool kEnforcesUnregister = true;  // peers can't use a descriptor after unregister_region()
  static constexpr bool kHasGrants = true;
  /// Uses several connections, as between hosts.
  static std::unique_ptr<Transport> make(std::uint32_t transfers_max) {
    TcpOptions options;
    options.transfers_max = transfers_max;
    options.local_connections = options.connections;
    return make_tcp_transport(options).value();
  }
};
/// TCP with a cluster key, which makes connections encrypted.
struct EncryptedTcpBackend : TcpBackend {
  static constexpr std::string_view kName = "tcp_encrypted";
  static std::unique_ptr<Transport> make(std::uint32_t transfers_max) {
    TcpOptions options;
    options.transfers_max = transfers_max;
    options.local_connections = options.connections;
    options.key = net::ClusterKey(std::string(net::ClusterKey::kBytesMin, 'k'));
    options.encrypt = net::Encrypt::kAlways;
    return make_tcp_transport(options).value();
  }
};
struct OneTcpBackend : TcpBackend {
  static constexpr std::string_view kName = "tcp1";
  static std::unique_ptr<Transport> make(std::uint32_t transfers_max) {
    TcpOptions options;
    options.transfers_max = transfers_max;
    options.connections = options.local_connections = 1;
    return make_tcp_transport(options).value();
  }
};
template <std::uint64_t kPackedBytesMax>
std::unique_ptr<Transport> make_ucx(std::uint32_t transfers_max) {
  let_ucx_use_tcp();
  UcxOptions options;
  options.transfers_max = transfers_max;
  options.packed_bytes_max = kPackedBytesMax;
  return make_ucx_transport(options).value();
}
struct UcxPackedBackend : TcpBackend {
  static constexpr std::string_view kName = "ucx_packed";
  static constexpr auto make = make_ucx<~std::uint64_t{0}>;
};
struct UcxBackend : TcpBackend {
  static constexpr std::string_view kName = "ucx_one_sided";
  static constexpr bool kEnforcesUnregister = false;
  static constexpr auto make = make_ucx<0>;
};
/// UCX with the memory of a simulated GPU.
struct UcxDeviceBackend : UcxBackend {
  static constexpr std::string_view kName = "ucx_device";
  static constexpr bool kHasGrants = false;
  static std::unique_ptr<Transport> make(std::uint32_t transfers_max) {
    return std::make_unique<OnDevice>(make_ucx<0>(transfers_max), process_gpu());
  }
};
/// A simulated NCCL on simulated GPUs.
struct NcclBackend : TcpBackend {
  static constexpr std::string_view kName = "nccl_sim";
  static std::unique_ptr<Transport> make(std::uint32_t transfers_max) {
    NcclOptions options;
    options.transfers_max = transfers_max;
    options.device = &process_gpu();
    return nccl::make_transport_over(make_sim_communicators(process_gpu()), options).value();
  }
};
template <bool kUsesMappings>
std::unique_ptr<Transport> make_shm(std::uint32_t transfers_max) {
  ShmOptions options;
  options.transfers_max = transfers_max;
  options.use_mappings = kUsesMappings;
  return make_shm_transport(options).value();
}
struct ShmBackend : TcpBackend {
  static constexpr std::string_view kName = "shm";
  static constexpr bool kNeedsRunningRemote = false;
  static constexpr auto make = make_shm<true>;
};
struct CmaBackend : ShmBackend {
  static constexpr std::string_view kName = "cma";
  static constexpr auto make = make_shm<false>;
};
/// Simulated GPUs that can access each other's memory.
struct GpuIpcBackend : ShmBackend {
  static constexpr std::string_view kName = "gpu_ipc_sim";
  static constexpr bool kEnforcesUnregister = false;
  static constexpr bool kHasGrants = false;
  static std::unique_ptr<Transport> make(std::uint32_t transfers_max) {
    GpuIpcOptions options;
    options.transfers_max = transfers_max;
    options.in_flight_bytes = 16 << 20;  // so small that some of the contract suite's transfers must wait
    options.device = &process_gpu();
    return std::make_unique<OnDevice>(make_gpu_ipc_transport(options).value(), process_gpu());
  }
};
/// The backends among which the planner chooses between two processes of one host.
struct AutoBackend : ShmBackend {
  static constexpr std::string_view kName = "auto";
  static std::unique_ptr<Transport> make(std::uint32_t transfers_max) {
    TransportOptions options;
    options.common.transfers_max = transfers_max;
    return make_transport(options).value();
  }
};

/// The backends of the contract suite whose remotes are other processes.
using ProcessBackends = std::tuple<ShmBackend, CmaBackend, TcpBackend, EncryptedTcpBackend, UcxBackend,
                                   UcxPackedBackend, UcxDeviceBackend, GpuIpcBackend, NcclBackend, AutoBackend>;

/// Makes a backend by its name, so that both processes of a test use the same backend.
inline std::unique_ptr<Transport> make_backend(std::string_view name, std::uint32_t transfers_max = 1024) {
  std::unique_ptr<Transport> made;
  const auto try_one = [&]<class Backend>(Backend) {
    if (Backend::kName == name) made = Backend::make(transfers_max);
  };
  std::apply([&](auto... backends) { (try_one(backends), ...); }, ProcessBackends());
  try_one(OneTcpBackend());
  KVFERRY_CHECK(made != nullptr, "no backend is called {}", name);
  return made;
}

}  // namespace kvferry
