// Backends by name, for the two processes of a test to have the same.
#pragma once

#include <memory>
#include <string_view>

#include "tests/transport/on_device.h"
#include "tests/transport/sim_communicators.h"
#include "transport/base/check.h"
#include "transport/make_transport.h"
#include "transport/nccl/nccl_transport.h"

namespace kvferry {

inline std::unique_ptr<Transport> make_backend(std::string_view name, std::uint32_t transfers_max = 1024) {
  if (name == "ucx_one_sided" || name == "ucx_packed" || name == "ucx_device") {
    UcxOptions options;
    options.transfers_max = transfers_max;
    options.packed_bytes_max = name == "ucx_packed" ? ~std::uint64_t{0} : 0;
    std::unique_ptr<Transport> made = make_ucx_transport(options).value();
    if (name != "ucx_device") return made;
    return std::make_unique<OnDevice>(std::move(made), process_gpu());
  }
  if (name == "shm" || name == "cma") {
    ShmOptions options;
    options.transfers_max = transfers_max;
    options.use_mappings = name == "shm";
    return make_shm_transport(options).value();
  }
  if (name == "tcp" || name == "tcp1") {  // over several connections, as between hosts, or over one
    TcpOptions options;
    options.transfers_max = transfers_max;
    options.connections = name == "tcp" ? options.connections : 1;
    options.local_connections = options.connections;
    return make_tcp_transport(options).value();
  }
  if (name == "nccl_sim") {
    NcclOptions options;
    options.transfers_max = transfers_max;
    options.device = &process_gpu();
    return nccl::make_transport_over(make_sim_communicators(process_gpu()), options).value();
  }
  if (name == "gpu_ipc_sim") {
    GpuIpcOptions options;
    options.transfers_max = transfers_max;
    options.device = &process_gpu();
    return std::make_unique<OnDevice>(make_gpu_ipc_transport(options).value(), process_gpu());
  }
  if (name == "auto") {
    TransportOptions options;
    options.common.transfers_max = transfers_max;
    return make_transport(options).value();
  }
  check_failed("name", __FILE__, __LINE__, fmt::format("no backend is called {}", name));
}

}  // namespace kvferry
