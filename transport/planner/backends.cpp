#include "transport/planner/backends.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "transport/backend.h"
#include "transport/base/check.h"
#include "transport/base/log.h"
#include "transport/base/printable.h"

namespace kvferry::planner {
namespace {

/// UCX takes seconds to start, and has nothing to use without RDMA unless the user's UCX_TLS allows TCP. kAuto uses it
/// on hosts with RDMA devices, or for users who set UCX_TLS.
bool is_ucx_useful(const TransportOptions&) {
  std::error_code failure;
  const std::filesystem::directory_iterator devices("/sys/class/infiniband", failure);
  return std::getenv("UCX_TLS") != nullptr || (!failure && devices != std::filesystem::directory_iterator{});
}

bool is_always_useful(const TransportOptions&) { return true; }
bool has_gpu(const TransportOptions& options) { return options.device != nullptr; }

template <class Options>
Options with_common(Options own, const TransportOptions& options) {
  static_cast<CommonOptions&>(own) = options.common;
  return own;
}

Result<std::unique_ptr<Transport>> make_shm(const TransportOptions& options) {
  ShmOptions shm = with_common(options.shm, options);
  shm.use_mappings = options.path != Path::kCma;
  shm.use_cma = options.path != Path::kShm;
  return make_shm_transport(shm);
}
Result<std::unique_ptr<Transport>> make_ucx(const TransportOptions& options) {
  UcxOptions ucx = with_common(options.ucx, options);
  ucx.device = options.device;
  return make_ucx_transport(ucx);
}
Result<std::unique_ptr<Transport>> make_tcp(const TransportOptions& options) {
  return make_tcp_transport(with_common(options.tcp, options));
}
Result<std::unique_ptr<Transport>> make_gpu_ipc(const TransportOptions& options) {
  GpuIpcOptions gpu_ipc = with_common(GpuIpcOptions{}, options);
  gpu_ipc.device = options.device;
  return make_gpu_ipc_transport(gpu_ipc);
}
Result<std::unique_ptr<Transport>> make_nccl(const TransportOptions& options) {
  NcclOptions nccl = with_common(NcclOptions{}, options);
  nccl.device = options.device;
  nccl.control.listen_host = options.tcp.listen_host;
  nccl.control.listen_ports = options.tcp.listen_ports;
  nccl.control.encrypt = options.tcp.encrypt;
  return make_nccl_transport(nccl);
}

// Limit on the time that NCCL takes to make a communicator: it examines the machine and opens connections.
constexpr TimeNs kNcclSetup = 10 * kSecond;

constexpr std::uint32_t kShared = PathInfo::bit_of(MemoryClass::kShared);
constexpr std::uint32_t kOther = PathInfo::bit_of(MemoryClass::kOther);
constexpr std::uint32_t kHost = kShared | kOther;
constexpr std::uint32_t kDevice = PathInfo::bit_of(MemoryClass::kDevice);

// The rows are in the order of preference, which is used until the paths to a peer are measured.
constexpr PathInfo kPaths[] = {
    {Path::kShm, "shm", "shm", kShared, false, is_always_useful, make_shm, 0, change_shm_secret},
    {Path::kCma, "cma", "shm", kOther, false, is_always_useful, make_shm, 0, change_shm_secret},
    {Path::kUcx, "ucx", "ucx", kHost | kDevice, false, is_ucx_useful, make_ucx, 0, change_ucx_secret},
    {Path::kTcp, "tcp", "tcp", kHost, false, is_always_useful, make_tcp},
    {Path::kGpuIpc, "gpu_ipc", "gpu_ipc", kDevice, true, has_gpu, make_gpu_ipc, 0, change_gpu_ipc_secret},
    {Path::kNccl, "nccl", "nccl", kHost | kDevice, true, has_gpu, make_nccl, kNcclSetup},
};
constexpr std::string_view kAutoName = "auto";

}  // namespace

std::span<const PathInfo> all_paths() { return kPaths; }

const PathInfo& info_of(Path path) {
  const auto info =
      std::find_if(std::begin(kPaths), std::end(kPaths), [&](const auto& one) { return one.path == path; });
  KVFERRY_CHECK(info != std::end(kPaths), "the table of transport paths has no row for path number {}",
                static_cast<int>(path));
  return *info;
}

Result<Backends> make_backends(const TransportOptions& options) {
  const bool is_auto = options.path == Path::kAuto;
  Backends backends;
  std::vector<std::string_view> tried;
  for (const PathInfo& info : kPaths) {
    if (!(is_auto ? info.is_useful(options) : info.path == options.path)) continue;
    if (std::find(tried.begin(), tried.end(), info.backend) != tried.end()) continue;
    tried.push_back(info.backend);
    Result<std::unique_ptr<Transport>> made = info.make(options);
    if (made) {
      backends.push_back({info.backend, std::move(*made), (info.reaches & kHost) != 0});
    } else if (is_auto && made.error().code == ErrorCode::kUnavailable) {
      log().warn("transport: backend {} is not used: {}", info.backend, made.error().what);
    } else {
      return std::move(made).error();
    }
  }
  if (backends.empty())
    return Error{ErrorCode::kUnavailable,
                 "no transport backend is available on this machine; warnings in the log say why"};
  return backends;
}

}  // namespace kvferry::planner

namespace kvferry {

std::vector<std::string_view> path_names(bool has_gpu) {
  std::vector<std::string_view> names = {planner::kAutoName};
  for (const planner::PathInfo& info : planner::all_paths()) {
    if (has_gpu || !info.needs_gpu) names.push_back(info.name);
  }
  return names;
}

Result<Path> parse_path(std::string_view name) {
  if (name == planner::kAutoName) return Path::kAuto;
  for (const planner::PathInfo& info : planner::all_paths()) {
    if (info.name == name) return info.path;
  }
  return Error{ErrorCode::kInvalidArgument,
               fmt::format("unknown transport path '{}'; allowed: {}", name, fmt::join(path_names(), ", "))};
}

Result<std::string> change_secrets(const std::string& bytes, const SecretChange& change) {
  planner::Address address = KVFERRY_TRY(read_address<planner::Address>(bytes, planner::kProtocolVersion, "planner"));
  for (planner::Part& part : address.parts) {
    const auto info = std::ranges::find(planner::all_paths(), part.backend, &planner::PathInfo::backend);
    if (info == planner::all_paths().end())
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("the address has a part for the unknown backend '{}'", printable(part.backend))};
    if (info->change_secret != nullptr) part.bytes = KVFERRY_TRY(info->change_secret(part.bytes, change));
  }
  return encode(address);
}

Result<std::string> address_for(const std::string& address, std::string_view curve_key) {
  return change_secrets(address, [&](const std::string& root) { return AddressSecret::personal(root, curve_key); });
}

std::string_view name_of(Path path) { return path == Path::kAuto ? planner::kAutoName : planner::info_of(path).name; }

}  // namespace kvferry
