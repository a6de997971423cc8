#include "launch/bench/harness/host_facts.h"

#include <sys/utsname.h>

#include <ctime>
#include <fstream>
#include <string>
#include <thread>

#include "transport/base/versions.h"

namespace kvferry::bench {
namespace {

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(std::min(line.find(':') + 2, line.size()));
  }
  return "";
}

/// "always [madvise] never" -> "madvise"
std::string chosen(const std::string& line) {
  const std::size_t open = line.find('[');
  const std::size_t close = line.find(']');
  return open == std::string::npos || close == std::string::npos ? "" : line.substr(open + 1, close - open - 1);
}

}  // namespace

nlohmann::json host_facts() {
  utsname kernel{};
  ::uname(&kernel);
  const std::time_t now = std::time(nullptr);
  char date[32] = {};
  std::tm utc{};
  std::strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", ::gmtime_r(&now, &utc));
  return {{"version", version()},
          {"boot_id", first_line("/proc/sys/kernel/random/boot_id")},
          {"cores", std::thread::hardware_concurrency()},
          {"cpu", cpu_model()},
          {"kernel", std::string(kernel.sysname) + " " + kernel.release},
          {"huge_pages",
           {{"anonymous", chosen(first_line("/sys/kernel/mm/transparent_hugepage/enabled"))},
            {"shared", chosen(first_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))}}},
          {"date", date}};
}

}  // namespace kvferry::bench
