#include "tests/transport/soak_resources.h"

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <vector>

namespace kvferry::soak {
namespace {

namespace fs = std::filesystem;

/// Returns what the file has; of a process that ends meanwhile, what could be read.
std::string read(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

/// Returns the number after "<key>:" in /proc/<pid>/status.
std::uint64_t status(const fs::path& process, const std::string& key) {
  std::istringstream lines(read(process / "status"));
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(key + ":")) return std::stoull(line.substr(key.size() + 1));
  }
  return 0;
}

std::vector<fs::path> family() {
  const std::uint64_t self = static_cast<std::uint64_t>(::getpid());
  std::vector<fs::path> processes{"/proc/self"};
  for (const fs::directory_entry& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") == std::string::npos && status(entry.path(), "PPid") == self)
      processes.push_back(entry.path());
  }
  return processes;
}

}  // namespace

Resources Resources::now() {
  Resources found;
  std::set<std::string> segments;
  for (const fs::path& process : family()) {
    ++found.num_processes;
    found.num_threads += status(process, "Threads");
    found.rss_bytes += status(process, "VmRSS") * 1024;
    std::error_code gone;
    for ([[maybe_unused]] const auto& fd : fs::directory_iterator(process / "fd", gone)) ++found.num_fds;
    std::istringstream maps(read(process / "maps"));
    for (std::string line; std::getline(maps, line);) {
      std::istringstream words(line);
      std::string range, access, file_offset, device, inode, path;
      words >> range >> access >> file_offset >> device >> inode >> path;
      if (path.starts_with("/dev/shm/") || path.starts_with("/memfd:")) segments.insert(device + ' ' + inode);
    }
  }
  found.num_segments = segments.size();
  return found;
}

std::string Resources::str() const {
  return fmt::format("{} processes, {} descriptors, {} threads, {} segments, {:.1f} MiB", num_processes, num_fds,
                     num_threads, num_segments, static_cast<double>(rss_bytes) / (1 << 20));
}

}  // namespace kvferry::soak
