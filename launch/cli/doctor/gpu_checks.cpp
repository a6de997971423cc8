#include "launch/cli/doctor/gpu_checks.h"

#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

#include "transport/base/net/near_nics.h"

namespace kvferry::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kDriverLibrary = "libcuda.so.1";
// A kind of Linux namespace. `of_host`: target of the link /proc/self/ns/FILE in the machine's first namespace of this
// kind, whose number is fixed in the kernel (PROC_IPC_INIT_INO, PROC_PID_INIT_INO).
struct Namespace {
  const char* file;
  const char* of_host;
  const char* name;
};
constexpr Namespace kNamespaces[] = {{"ipc", "ipc:[4026531839]", "IPC"}, {"pid", "pid:[4026531836]", "PID"}};

/// Returns whether CUDA's driver library is where the loader finds it: in a folder of LD_LIBRARY_PATH or in the cache
/// that ldconfig writes.
bool has_driver_library(const Host& host) {
  const char* const folders = host.get_env("LD_LIBRARY_PATH");
  std::istringstream list(folders == nullptr ? "" : folders);
  for (std::string folder; std::getline(list, folder, ':');)
    if (std::error_code ignored; !folder.empty() && fs::exists(fs::path(folder) / kDriverLibrary, ignored)) return true;
  std::ifstream cache(host.root / "etc/ld.so.cache", std::ios::binary);
  const std::string libraries{std::istreambuf_iterator<char>(cache), {}};
  return libraries.find(kDriverLibrary) != std::string::npos;
}

}  // namespace

std::vector<std::string> nics_of_gpus(const Host& host) {
  const char* const by_user = host.get_env("UCX_NET_DEVICES");
  std::vector<std::string> lines;
  for (const std::string& gpu : net::gpus_of_host(host.root)) {
    const net::NearNics near = net::nics_near(host.root, gpu);
    lines.push_back(fmt::format("GPU {}, NUMA node {}: {}{}", gpu, near.numa_node, net::describe(near),
                                by_user == nullptr ? "" : fmt::format("; UCX_NET_DEVICES={} has priority", by_user)));
  }
  return lines;
}

std::vector<Finding> check_cuda_ipc(const Host& host) {
  std::error_code failed;
  if (!fs::exists(host.root / "proc/driver/nvidia", failed)) return {};
  std::vector<Finding> found;
  if (!has_driver_library(host))
    found.push_back({.what = fmt::format("this host has NVIDIA's driver, but the loader does not find {}, so neither "
                                         "vLLM nor kvferry can use the GPUs",
                                         kDriverLibrary),
                     .advice =
                         "start the container with NVIDIA's container toolkit (docker run --gpus all), or install "
                         "the driver's libraries and run ldconfig"});
  std::string own;
  for (const Namespace& kind : kNamespaces) {
    const std::string current = fs::read_symlink(host.root / "proc/self/ns" / kind.file, failed).string();
    if (!failed && current != kind.of_host) own += fmt::format("{}{}", own.empty() ? "" : " and ", kind.name);
  }
  if (!own.empty())
    found.push_back({.what = fmt::format("this container has its own {} namespace, so CUDA IPC can't map GPU memory of "
                                         "servers in other containers of this host, and their KV takes a slower path",
                                         own),
                     .advice =
                         "start the servers of a host in one container, or with the host's namespaces (docker run "
                         "--ipc=host --pid=host; hostIPC and hostPID in Kubernetes)",
                     .is_hint = true});
  return found;
}

}  // namespace kvferry::cli
