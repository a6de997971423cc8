#include "launch/cli/doctor/host_checks.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include "launch/cli/doctor/gpu_checks.h"
#include "launch/cli/doctor/key_checks.h"
#include "transport/base/memory/cgroup_memory.h"
#include "transport/base/net/sysfs.h"

namespace kvferry::cli {
namespace {

namespace fs = std::filesystem;
using net::entries;
using net::first_line;

using Findings = std::vector<Finding>;  // findings without the check's name, which examine_host() adds

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
// The size and the free bytes of /dev/shm must exceed the 64 MiB that containers have by default: vLLM needs more.
constexpr std::uint64_t kSharedMemoryMin = 64 * kMiB;
constexpr std::uint64_t kDescriptorsMin = 4096;

std::string mib(std::uint64_t bytes) { return fmt::format("{} MiB", bytes / kMiB); }

/// Returns the value of an environment variable, or nullopt if the variable is missing or empty.
std::optional<std::string> variable(const Host& host, const char* name) {
  const char* const value = host.get_env(name);
  return value != nullptr && *value != '\0' ? std::optional<std::string>(value) : std::nullopt;
}

/// Returns the names of the InfiniBand and RoCE devices.
std::vector<std::string> rdma_devices(const Host& host) { return entries(host.root / "sys/class/infiniband"); }

struct RdmaPort {
  std::string device, name;
  std::string state;  // for example "4: ACTIVE"; empty: unknown
  bool is_active() const { return state.find("ACTIVE") != std::string::npos; }
};
std::vector<RdmaPort> rdma_ports(const Host& host) {
  std::vector<RdmaPort> found;
  for (const std::string& device : rdma_devices(host)) {
    const fs::path ports = host.root / "sys/class/infiniband" / device / "ports";
    for (const std::string& port : entries(ports)) found.push_back({device, port, first_line(ports / port / "state")});
  }
  return found;
}

/// Returns a figure of /proc/meminfo in bytes, 0 if the figure is missing.
std::uint64_t memory_figure(const Host& host, const std::string& name) {
  std::ifstream file(host.root / "proc/meminfo");
  std::string key, rest;
  for (std::uint64_t kilobytes = 0; file >> key >> kilobytes; std::getline(file, rest))
    if (key == name + ":") return kilobytes << 10;
  return 0;
}

/// Returns the hard limit on a resource in /proc/self/limits, or the largest number if there is no limit.
std::uint64_t hard_limit(const Host& host, const std::string& name) {
  std::ifstream file(host.root / "proc/self/limits");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(name)) continue;
    std::istringstream fields(line.substr(name.size()));
    std::string soft, hard;
    fields >> soft >> hard;
    std::uint64_t limit = 0;
    if (std::from_chars(hard.data(), hard.data() + hard.size(), limit).ec == std::errc()) return limit;
  }
  return ~std::uint64_t{0};
}

std::uint64_t free_on_host(const Host& host) { return memory_figure(host, "MemAvailable"); }

std::uint64_t free_in_cgroups(const Host& host) {
  return bytes_left_in_cgroups((host.root / "proc/self/cgroup").string(), (host.root / "sys/fs/cgroup").string());
}

Findings check_memory(const Host& host) {
  const std::uint64_t on_host = free_on_host(host), in_cgroups = free_in_cgroups(host);
  const std::uint64_t left = std::min(on_host, in_cgroups);
  if (left >= host.pool_bytes) return {};
  return {
      {.what = fmt::format("a pool of {} does not fit into the {} of free memory {}", mib(host.pool_bytes), mib(left),
                           on_host <= in_cgroups ? "of this host" : "below this container's memory limit"),
       .advice = "set a smaller pool_bytes, which is the size of each rank's pool, or give this host or container more "
                 "memory"}};
}

Findings check_shared_memory(const Host& host) {
  const std::string folder = (host.root / "dev/shm").string();
  struct statvfs space {};
  if (::statvfs(folder.c_str(), &space) != 0)
    return {
        {.what = "there is no /dev/shm, over which vLLM's processes exchange messages",
         .advice = "mount a tmpfs at /dev/shm (docker run --shm-size=1g; in Kubernetes an emptyDir of medium Memory)"}};
  const std::uint64_t total = space.f_blocks * space.f_frsize, free = space.f_bavail * space.f_frsize;
  if (total > kSharedMemoryMin && free > kSharedMemoryMin) return {};
  return {
      {.what = fmt::format("/dev/shm has {} of {} left, but vLLM's processes, which exchange messages over it, need "
                           "more than {}",
                           mib(free), mib(total), mib(kSharedMemoryMin)),
       .advice = "make it larger (docker run --shm-size=1g), or remove what killed servers left there"}};
}

/// Returns the names of files in /dev/shm that processes have mapped or opened, as far as this user may see that.
std::set<std::string> shared_files_in_use(const Host& host) {
  std::set<std::string> names;
  const auto add = [&names](std::string_view path) {
    constexpr std::string_view kFolder = "/dev/shm/";
    if (const std::size_t at = path.find(kFolder); at != std::string_view::npos)
      names.emplace(path.substr(at + kFolder.size()));
  };
  for (const std::string& process : entries(host.root / "proc")) {
    if (process.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream maps(host.root / "proc" / process / "maps");
    for (std::string line; std::getline(maps, line);) add(line);
    const fs::path opened = host.root / "proc" / process / "fd";
    std::error_code ignored;
    for (const std::string& fd : entries(opened)) add(fs::read_symlink(opened / fd, ignored).string());
  }
  return names;
}

Findings check_leftovers(const Host& host) {
  const std::set<std::string> in_use = shared_files_in_use(host);
  std::uint64_t bytes = 0, number = 0;
  for (const std::string& name : entries(host.root / "dev/shm")) {
    // The names of vLLM's files in /dev/shm begin with psm_, the default prefix of Python's shared memory.
    if (!name.starts_with("psm_") || in_use.contains(name)) continue;
    std::error_code failed;
    const std::uintmax_t size = fs::file_size(host.root / "dev/shm" / name, failed);
    bytes += failed ? 0 : size;
    ++number;
  }
  if (number == 0) return {};
  return {{.what = fmt::format("{} files in /dev/shm with {} belong to no process that this user can see", number,
                               mib(bytes)),
           .advice = "remove those /dev/shm/psm_* that no running vLLM or other Python program uses: a killed vLLM "
                     "leaves its files there",
           .is_hint = true}};
}

Findings check_descriptors(const Host& host) {
  const std::uint64_t limit = hard_limit(host, "Max open files");
  if (limit >= kDescriptorsMin) return {};
  return {
      {.what = fmt::format("a process may open {} files, and a node needs up to {}", limit, kDescriptorsMin),
       .advice = fmt::format("raise the hard limit (ulimit -Hn {0}; LimitNOFILE={0} in systemd)", kDescriptorsMin)}};
}

Findings check_locked_memory(const Host& host) {
  const std::vector<std::string> devices = rdma_devices(host);
  const std::uint64_t limit = hard_limit(host, "Max locked memory");
  if (devices.empty() || limit >= host.pool_bytes) return {};
  return {{.what = fmt::format("a process may lock {} of memory, so {} can't register a pool of {}", mib(limit),
                               devices.front(), mib(host.pool_bytes)),
           .advice = "raise the limit (ulimit -l unlimited; LimitMEMLOCK=infinity in systemd)"}};
}

Findings check_rdma_ports(const Host& host) {
  Findings found;
  for (const RdmaPort& port : rdma_ports(host)) {
    if (port.is_active()) continue;
    found.push_back({.what = fmt::format("port {} of {} is not active ({})", port.name, port.device,
                                         port.state.empty() ? "no state" : port.state),
                     .advice = "look at the cable and the subnet manager, or leave the device out with "
                               "UCX_NET_DEVICES"});
  }
  return found;
}

/// Splits a list at its commas.
std::vector<std::string> words_of(const std::string& list) {
  std::vector<std::string> words;
  std::istringstream text(list);
  for (std::string word; std::getline(text, word, ',');) words.push_back(word);
  return words;
}

/// Returns whether a value of UCX_TLS allows TCP. A value that begins with '^' lists transports that UCX leaves out.
bool allows_tcp(const std::string& transports) {
  const bool is_list_of_others = transports.starts_with('^');
  const std::vector<std::string> words = words_of(transports.substr(is_list_of_others ? 1 : 0));
  return is_list_of_others != (std::ranges::count(words, "tcp") + std::ranges::count(words, "all") > 0);
}

Findings check_ucx(const Host& host) {
  Findings found;
  const std::vector<std::string> devices = rdma_devices(host);
  constexpr std::string_view kRdma[] = {"all", "ib", "rc", "ud", "dc"};
  if (const auto allowed = variable(host, "UCX_TLS"); allowed) {
    const bool has_rdma =
        allowed->starts_with('^') || std::ranges::any_of(words_of(*allowed), [&](const std::string& word) {
          return std::ranges::any_of(kRdma, [&](std::string_view name) { return word.starts_with(name); });
        });
    if (!has_rdma && !devices.empty())
      found.push_back({.what = fmt::format("UCX_TLS={} leaves out RDMA, so UCX can't use {} of this host", *allowed,
                                           devices.front()),
                       .advice = "unset UCX_TLS, or add rc to it"});
    else if (allows_tcp(*allowed))
      found.push_back({.what = fmt::format("UCX_TLS={} lets UCX use TCP, by which a peer can end a node", *allowed),
                       .advice = "unset UCX_TLS, or leave tcp out of it (UCX_TLS=^tcp): kvferry uses TCP without UCX",
                       .is_hint = true});
  }
  const std::vector<std::string> interfaces = entries(host.root / "sys/class/net");
  for (const std::string& word : words_of(variable(host, "UCX_NET_DEVICES").value_or(""))) {
    const std::string device = word.substr(0, word.find(':'));
    if (device == "all" || std::ranges::count(devices, device) + std::ranges::count(interfaces, device) > 0) continue;
    found.push_back({.what = fmt::format("UCX_NET_DEVICES names {}, which this host does not have", device),
                     .advice = "name devices that /sys/class/infiniband or /sys/class/net shows"});
  }
  return found;
}

/// Returns whether the kernel makes huge pages of shared memory when a process asks for it (MADV_COLLAPSE, Linux 6.1),
/// also where shmem_enabled is `never`.
bool makes_huge_pages_on_demand(const Host& host) {
  int major = 0;
  int minor = 0;
  char dot = 0;
  std::ifstream(host.root / "proc/sys/kernel/osrelease") >> major >> dot >> minor;
  return major > 6 || (major == 6 && minor >= 1);
}

Findings check_huge_pages(const Host& host) {
  const std::string made = first_line(host.root / "sys/kernel/mm/transparent_hugepage/shmem_enabled");
  const bool makes_none = made.find("[deny]") != std::string::npos ||
                          (made.find("[never]") != std::string::npos && !makes_huge_pages_on_demand(host));
  std::uint64_t free_pages = 0;
  std::ifstream(host.root / "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages") >> free_pages;
  if (!makes_none || free_pages * 2 * kMiB >= host.pool_bytes) return {};
  return {{.what = fmt::format("pools have pages of 4 KiB, which makes copies slower (shmem_enabled is '{}')", made),
           .advice = fmt::format("echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, or set {} pages of "
                                 "2 MiB aside with vm.nr_hugepages for each rank",
                                 host.pool_bytes / (2 * kMiB) + 1),
           .is_hint = true}};
}

Findings check_cma(const Host& host) {
  int scope = 0;
  std::ifstream(host.root / "proc/sys/kernel/yama/ptrace_scope") >> scope;
  if (scope == 0) return {};
  return {{.what = fmt::format("processes can't read each other's memory (kernel.yama.ptrace_scope is {}), so path cma "
                               "can't be used; pools are shared memory and do not need it",
                               scope),
           .advice = "do nothing, unless your own programs transfer memory outside of pools; in this case set "
                     "kernel.yama.ptrace_scope to 0",
           .is_hint = true}};
}

struct HostCheck {
  const char* name;
  Findings (*run)(const Host&);
};
constexpr HostCheck kHostChecks[] = {
    {"memory", check_memory},
    {"shared memory", check_shared_memory},
    {"leftovers", check_leftovers},
    {"descriptors", check_descriptors},
    {"locked memory", check_locked_memory},
    {"RDMA ports", check_rdma_ports},
    {"UCX", check_ucx},
    {"huge pages", check_huge_pages},
    {"CMA", check_cma},
    {"cluster key",
     [](const Host& host) { return check_key(variable(host, "KVFERRY_CLUSTER_KEY_FILE").value_or("")); }},
    {"CUDA IPC", check_cuda_ipc},
};

}  // namespace

std::uint64_t free_memory(const Host& host) { return std::min(free_on_host(host), free_in_cgroups(host)); }

bool has_active_rdma(const Host& host) { return std::ranges::any_of(rdma_ports(host), &RdmaPort::is_active); }

std::vector<std::string> host_check_names() {
  std::vector<std::string> names;
  for (const HostCheck& check : kHostChecks) names.emplace_back(check.name);
  return names;
}

std::vector<Finding> examine_host(const Host& host) {
  std::vector<Finding> found;
  for (const HostCheck& check : kHostChecks) {
    for (Finding& finding : check.run(host)) {
      finding.check = check.name;
      found.push_back(std::move(finding));
    }
  }
  return found;
}

}  // namespace kvferry::cli
