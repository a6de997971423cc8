#include "launch/bench/harness/figures_file.h"

#include <fmt/format.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <fstream>
#include <string>
#include <system_error>
#include <thread>

#include "launch/bench/harness/bench_venv.h"
#include "launch/bench/harness/failure.h"
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

/// Returns the word in brackets, such as "madvise" of "always [madvise] never", or an empty text if there is none.
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

void write_json(const std::string& name, const nlohmann::json& figures) {
  if (name.empty()) return;
  errno = 0;
  std::ofstream file(name);
  if (file) file << figures.dump(2) << '\n';
  if (file) file.close();
  if (!file) {
    // A stream keeps no reason, but errno still has it, because the failed system call was the last one.
    const std::string why = errno == 0 ? "unknown reason" : std::generic_category().message(errno);
    throw Failure({ErrorCode::kUnavailable, fmt::format("can't write the figures to {}: {}", name, why)});
  }
}

std::string number_text(const nlohmann::json& figures, const std::string& name, int digits, double unit) {
  if (!figures.contains(name) || !figures[name].is_number()) return "-";
  return fmt::format("{:.{}f}", figures[name].get<double>() / unit, digits);
}

void try_part(const std::string& name, nlohmann::json& missing, const Say& say, const std::function<void()>& part) {
  const Result<void> done = attempt(part);
  if (done) return;
  if (done.error().code == ErrorCode::kCancelled) need(done);
  missing[name] = done.error().what;
  say(fmt::format("warning: {} is left out: {}", name, done.error().what));
}

void draw(const std::string& name, const std::string& kind, const nlohmann::json& figures, const Say& say) {
  if (name.empty()) return;
  const std::string file = name + ".json";
  const Result<void> done = attempt([&] {
    ensure_installed("plot", say);
    write_json(file, figures);
    run_to_end(script_command("plots.py", {kind, file, name}));
  });
  ::unlink(file.c_str());
  if (!done && done.error().code == ErrorCode::kCancelled) need(done);
  if (!done) say(fmt::format("warning: the plot was not drawn: {}", done.error().what));
}

}  // namespace kvferry::bench
