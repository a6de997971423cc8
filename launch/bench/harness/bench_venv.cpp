#include "launch/bench/harness/bench_venv.h"

#include <fmt/ranges.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include "launch/bench/harness/failure.h"
#include "launch/bench/harness/interrupt.h"

namespace kvferry::bench {
namespace {

namespace fs = std::filesystem;

// pip's --no-deps leaves out torch, which takes gigabytes: a benchmark needs no torch, or runs in vLLM's Python, which
// has it. --no-deps leaves out all other dependencies too, so these lists name the packages that are needed.
const std::map<std::string, std::vector<std::string>>& packages() {
  static const std::map<std::string, std::vector<std::string>> all{
      {"nixl", {"--no-deps", "numpy", "nixl-cu13"}},
      {"mooncake", {"--no-deps", "numpy", "mooncake-transfer-engine-non-cuda"}},
      {"ucx", {"--no-deps", "libucx-cu13"}},
      {"plot", {"matplotlib"}},
      {"controller_dynamo", {"--no-deps", "numpy", "msgspec", "pyzmq", "ai-dynamo-runtime"}},
      {"controller_lmcache",
       {"--no-deps", "numpy", "msgspec", "pyzmq", "uvloop", "pyyaml", "prometheus_client", "cachetools", "requests",
        "urllib3", "idna", "certifi", "charset-normalizer", "lmcache"}},
      {"controller_mooncake", {"--no-deps", "numpy", "mooncake-transfer-engine-non-cuda"}},
      {"controller_redis", {"--no-deps", "numpy", "hiredis"}},
      {"connector_lmcache", {"--no-deps", "sortedcontainers", "aiofile", "caio", "redis", "awscrt", "lmcache"}},
  };
  return all;
}

// The entry of packages() that is for vLLM's Python. Its packages are installed in beside_vllm_folder(), where the
// virtual environment's own Python does not find them.
constexpr std::string_view kBesideVllm = "connector_lmcache";

fs::path venv() {
  const fs::path build = own_program().parent_path().parent_path().parent_path();
  std::error_code ignored;
  if (build.filename() == "build" && fs::exists(build.parent_path() / "launch" / "bench", ignored))
    return build / "bench-venv";
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  const fs::path base =
      cache != nullptr && *cache == '/' ? fs::path(cache) : fs::path(home != nullptr ? home : "/tmp") / ".cache";
  return base / "kvferry" / "bench-venv";
}

void write_scripts() {
  std::error_code failure;
  fs::create_directories(venv() / "scripts", failure);
  for (const Script& script : scripts()) {
    // A worker may be reading the old file, so the new file replaces it by a rename.
    const fs::path path = venv() / "scripts" / script.name;
    const fs::path fresh = path.string() + fmt::format(".{}", ::getpid());
    std::ofstream(fresh) << script.text;
    fs::rename(fresh, path, failure);
    if (failure)
      throw Failure({ErrorCode::kUnavailable, fmt::format("can't write {}: {}", path.string(), failure.message())});
  }
}

}  // namespace

void ensure_installed(const std::string& what, const Say& say) {
  if (!packages().contains(what)) {
    std::vector<std::string> known;
    for (const auto& [name, words] : packages()) known.push_back(name);
    throw Failure({ErrorCode::kInvalidArgument,
                   fmt::format("the benchmark can't install '{}'; allowed: {}", what, fmt::join(known, ", "))});
  }
  const fs::path python = venv() / "bin" / "python";
  const fs::path stamp = venv() / fmt::format(".kvferry-{}", what);
  std::error_code ignored;
  if (!fs::exists(stamp, ignored)) {
    if (!fs::exists(venv() / "bin" / "pip", ignored)) {
      const char* chosen = std::getenv("PYTHON");
      say(fmt::format("creating the virtual environment {}", venv().string()));
      run_to_end({{chosen != nullptr ? chosen : "python3", "-m", "venv", venv().string()}, {}});
    }
    std::vector<std::string> words{python.string(), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"};
    const std::vector<std::string>& wanted = packages().at(what);
    words.insert(words.end(), wanted.begin(), wanted.end());
    if (what == kBesideVllm) words.insert(words.end(), {"--target", beside_vllm_folder()});
    say(fmt::format("installing {} from PyPI", wanted.back()));
    run_to_end({std::move(words), {}});
    std::ofstream(stamp) << "installed\n";
  }
  write_scripts();
}

std::string beside_vllm_folder() { return venv() / "beside-vllm"; }

std::string script_path(const std::string& script) {
  write_scripts();
  return (venv() / "scripts" / script).string();
}

void run_to_end(const Command& command) {
  ChildProcess child(command);
  int status = -1;
  while ((status = child.wait(100 * kMillisecond)) < 0) {
    if (is_interrupted()) throw Failure(interrupted());
  }
  if (status != 0)
    throw Failure({ErrorCode::kUnavailable,
                   fmt::format("the command '{}' failed with status {}; the last line of its stderr: '{}'",
                               fmt::join(command.words, " "), status, child.last_words())});
}

Command script_command(const std::string& script, std::vector<std::string> words) {
  words.insert(words.begin(), {(venv() / "bin" / "python").string(), (venv() / "scripts" / script).string()});
  return {std::move(words), {"PYTHONDONTWRITEBYTECODE=1", "PYTHONUNBUFFERED=1"}};
}

std::string newest_ucx_folder() {
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(venv() / "lib", ignored)) {
    const fs::path folder = entry.path() / "site-packages" / "libucx" / "lib";
    if (fs::exists(folder / "libucp.so.0", ignored)) return folder.string();
  }
  return "";
}

}  // namespace kvferry::bench
