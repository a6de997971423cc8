#include "transport/planner/backends.h"

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <utility>

#include "transport/base/log.h"

namespace kvferry {
namespace {

constexpr std::pair<Path, std::string_view> kPaths[] = {
    {Path::kAuto, "auto"}, {Path::kShm, "shm"},   {Path::kCma, "cma"},       {Path::kUcx, "ucx"},
    {Path::kTcp, "tcp"},   {Path::kNccl, "nccl"}, {Path::kGpuIpc, "gpu_ipc"}};

}  // namespace

Result<Path> parse_path(std::string_view name) {
  for (const auto& [path, path_name] : kPaths) {
    if (path_name == name) return path;
  }
  return Error{ErrorCode::kInvalidArgument,
               fmt::format("unknown path '{}'; allowed: auto, shm, cma, ucx, tcp, nccl, gpu_ipc", name)};
}

std::string_view name_of(Path path) {
  for (const auto& [known, name] : kPaths) {
    if (known == path) return name;
  }
  return "?";
}

}  // namespace kvferry

namespace kvferry::planner {
namespace {

/// UCX takes seconds of start-up and a thread, and is slower than plain sockets and mapped memory: it is for networks
/// and GPU memory that only it can drive, or for who asks for it by its variables.
bool ucx_is_worth_it() {
  std::error_code failure;
  const std::filesystem::directory_iterator devices("/sys/class/infiniband", failure);
  return std::getenv("UCX_TLS") != nullptr || (!failure && devices != std::filesystem::directory_iterator{});
}

}  // namespace

Result<std::vector<Backend>> make_backends(const TransportOptions& options) {
  const Path path = options.path;
  const bool is_auto = path == Path::kAuto;
  using Make = std::function<Result<std::unique_ptr<Transport>>()>;
  std::vector<std::pair<std::string_view, Make>> wanted;
  if (is_auto || path == Path::kShm || path == Path::kCma) {
    ShmOptions shm{options.common};
    shm.use_mappings = path != Path::kCma;
    shm.use_cma = path != Path::kShm;
    wanted.emplace_back("shm", [shm] { return make_shm_transport(shm); });
  }
  if (path == Path::kUcx || (is_auto && (options.device != nullptr || ucx_is_worth_it()))) {
    UcxOptions ucx;
    static_cast<CommonOptions&>(ucx) = options.common;
    wanted.emplace_back("ucx", [ucx] { return make_ucx_transport(ucx); });
  }
  if (is_auto || path == Path::kTcp) {
    TcpOptions tcp = options.tcp;
    static_cast<CommonOptions&>(tcp) = options.common;
    wanted.emplace_back("tcp", [tcp] { return make_tcp_transport(tcp); });
  }
  const bool has_gpu = options.device != nullptr;
  if (path == Path::kGpuIpc || (is_auto && has_gpu)) {
    GpuIpcOptions gpu_ipc;
    static_cast<CommonOptions&>(gpu_ipc) = options.common;
    gpu_ipc.device = options.device;
    wanted.emplace_back("gpu_ipc", [gpu_ipc] { return make_gpu_ipc_transport(gpu_ipc); });
  }
  if (path == Path::kNccl || (is_auto && has_gpu)) {
    NcclOptions nccl;
    static_cast<CommonOptions&>(nccl) = options.common;
    nccl.device = options.device;
    nccl.control.listen_host = options.tcp.listen_host;
    wanted.emplace_back("nccl", [nccl] { return make_nccl_transport(nccl); });
  }
  std::vector<Backend> backends;
  for (const auto& [name, make] : wanted) {
    Result<std::unique_ptr<Transport>> made = make();
    if (made) {
      backends.push_back({name, std::move(*made), name != "gpu_ipc"});
    } else if (is_auto && made.error().code == ErrorCode::kUnavailable) {
      log().warn("transport: {} is left out: {}", name, made.error().what);
    } else {
      return std::move(made).error();
    }
  }
  if (backends.empty()) return Error{ErrorCode::kUnavailable, "no way to move bytes is available on this machine"};
  return backends;
}

}  // namespace kvferry::planner
