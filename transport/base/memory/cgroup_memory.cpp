#include "transport/base/memory/cgroup_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string_view>

namespace kvferry {
namespace {

constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();

/// Names of the files, and of the lines of memory.stat, in one version of cgroups.
struct Version {
  const char *limit, *usage, *inactive, *active;
};
constexpr Version kVersion1{"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file",
                            "total_active_file"};
constexpr Version kVersion2{"/memory.max", "/memory.current", "inactive_file", "active_file"};

/// Returns the number in one of the kernel's files, or `otherwise` if the file is missing or contains "max".
std::uint64_t number_in(const std::string& path, std::uint64_t otherwise) {
  std::uint64_t number = 0;
  return std::ifstream(path) >> number ? number : otherwise;
}

std::uint64_t page_cache_bytes(const std::string& folder, const Version& version) {
  std::ifstream file(folder + "/memory.stat");
  std::string name;
  std::uint64_t sum = 0;
  for (std::uint64_t bytes = 0; file >> name >> bytes;)
    if (name == version.inactive || name == version.active) sum += bytes;
  return sum;
}

std::uint64_t bytes_left_in(const std::string& folder, const Version& version) {
  const std::uint64_t limit = number_in(folder + version.limit, kNoLimit);
  if (limit == kNoLimit) return kNoLimit;
  const std::uint64_t usage = number_in(folder + version.usage, 0);
  const std::uint64_t used = usage - std::min(usage, page_cache_bytes(folder, version));
  return limit - std::min(limit, used);
}

/// Returns the least bytes_left_in() of a cgroup and its ancestors. In a container, `path` may be the cgroup's path on
/// the host, which does not exist below `root`; then `root` is the container's own cgroup.
std::uint64_t least_along(const std::string& root, std::string path, const Version& version) {
  if (path.find("..") != std::string::npos) path.clear();
  std::uint64_t least = bytes_left_in(root, version);
  while (!path.empty()) {
    least = std::min(least, bytes_left_in(root + path, version));
    path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
  return least;
}

}  // namespace

std::uint64_t bytes_left_in_cgroups(const std::string& own_cgroups, const std::string& mount) {
  std::uint64_t least = kNoLimit;
  std::ifstream file(own_cgroups);
  // A line is "0::/PATH" (version 2) or "NUMBER:CONTROLLER,CONTROLLER:/PATH" (version 1).
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") least = std::min(least, least_along(mount, path, kVersion2));
    if (controllers.find(",memory,") != std::string::npos)
      least = std::min(least, least_along(mount + "/memory", path, kVersion1));
  }
  return least;
}

}  // namespace kvferry
