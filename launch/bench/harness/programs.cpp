#include "launch/bench/harness/programs.h"

#include <malloc.h>
#include <unistd.h>

#include <cstdlib>
#include <ctime>
#include <fstream>

#include "launch/bench/harness/failure.h"

namespace kvferry::bench {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr TimeNs kPatience = 300 * kSecond;  // between two lines; importing vLLM alone takes ten seconds

}  // namespace

fs::path own_program() {
  std::error_code failure;
  return fs::read_symlink("/proc/self/exe", failure);
}

std::string kvferry_program() {
  std::error_code failure;
  const fs::path program = own_program().parent_path() / "kvferry";
  if (!fs::exists(program, failure))
    throw Failure({ErrorCode::kUnavailable, fmt::format("there is no program {} to start", program.string())});
  return program.string();
}

Command self_command(std::vector<std::string> words) {
  words.insert(words.begin(), own_program());
  return {std::move(words), {}};
}

void run_peer_program(const Command& command, const Json& spec, const Say& say,
                      const std::function<void(const Json&)>& take) {
  ChildProcess child(command);
  (void)child.link().send(spec);  // if the program has ended already, its last words are the better error
  while (true) {
    const Result<Json> received = checked(child.link().receive(kPatience));
    if (!received && received.error().code == ErrorCode::kPeerLost)
      throw Failure({ErrorCode::kUnavailable, fmt::format("its program ended early: {}", child.last_words())});
    const Json line = need(received);
    if (line.contains("done")) return;
    if (line.contains("step") && line["step"].is_string())
      say(line["step"].get<std::string>());
    else
      take(line);
  }
}

TemporaryFolder::TemporaryFolder() {
  std::error_code failure;
  path_ = fs::temp_directory_path(failure) / "kvferry-benchXXXXXX";
  if (failure || ::mkdtemp(path_.data()) == nullptr)
    throw Failure({ErrorCode::kUnavailable, "no folder for temporary files can be made"});
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

double cpu_seconds(pid_t pid) {
  clockid_t clock{};
  timespec time{};
  if (::clock_getcpuclockid(pid, &clock) != 0) return 0;
  ::clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

double resident_bytes(pid_t pid) {
  if (pid == ::getpid()) ::malloc_trim(0);  // so that freed memory does not count
  std::ifstream statm(fmt::format("/proc/{}/statm", pid));
  std::uint64_t size = 0, resident = 0;
  statm >> size >> resident;
  return static_cast<double>(resident) * static_cast<double>(::sysconf(_SC_PAGESIZE));
}

}  // namespace kvferry::bench
