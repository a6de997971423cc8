#include "launch/bench/harness/programs.h"

#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <utility>

#include "launch/bench/harness/failure.h"
#include "launch/bench/harness/interrupt.h"

extern char** environ;

namespace kvferry::bench {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr TimeNs kLinePatience = 300 * kSecond;  // longest wait for a line; importing vLLM alone takes ten seconds

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> result;
  for (std::string& word : words) result.push_back(word.data());
  result.push_back(nullptr);
  return result;
}

std::vector<std::string> environment_with(const std::vector<std::string>& extra) {
  std::vector<std::string> all;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view name = std::string_view(*entry).substr(0, std::string_view(*entry).find('=') + 1);
    bool is_covered = false;
    for (const std::string& word : extra) is_covered |= word.starts_with(name);
    if (!is_covered) all.emplace_back(*entry);
  }
  all.insert(all.end(), extra.begin(), extra.end());
  return all;
}

}  // namespace

ChildProcess::ChildProcess(const Command& command) : errors_(::memfd_create("stderr", MFD_CLOEXEC)) {
  const auto failure = [&command] {
    return Failure({ErrorCode::kUnavailable,
                    fmt::format("can't start the program {}: {}", command.words.at(0), std::strerror(errno))});
  };
  int to_child[2] = {-1, -1}, from_child[2] = {-1, -1};
  if (!errors_ || ::pipe2(to_child, O_CLOEXEC) != 0) throw failure();
  const OwnedFd childs_stdin(to_child[0]);
  OwnedFd commands(to_child[1]);
  if (::pipe2(from_child, O_CLOEXEC) != 0) throw failure();
  const OwnedFd childs_stdout(from_child[1]);
  link_.emplace(OwnedFd(from_child[0]), std::move(commands));
  // argv and envp are made before fork(), because the child must not allocate between fork() and exec().
  std::vector<std::string> words = command.words;
  std::vector<std::string> environment = environment_with(command.environment);
  const std::vector<char*> argv = pointers(words);
  const std::vector<char*> envp = pointers(environment);
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) ::_exit(127);
    ::setpgid(0, 0);  // a terminal's Ctrl-C then reaches only the parent, which ends its child
    ::dup2(childs_stdin.get(), STDIN_FILENO);
    ::dup2(childs_stdout.get(), STDOUT_FILENO);
    ::dup2(errors_.get(), STDERR_FILENO);
    ::execvpe(argv[0], argv.data(), envp.data());
    const char* why = std::strerror(errno);
    if (::write(STDERR_FILENO, why, std::strlen(why)) < 0) ::_exit(126);
    ::_exit(127);
  }
  if (pid_ < 0) throw failure();
}

ChildProcess::~ChildProcess() {
  if (pid_ > 0 && (is_interrupted() || wait(2 * kSecond) < 0)) {
    ::kill(pid_, SIGTERM);
    if (wait(4 * kSecond) < 0) ::kill(pid_, SIGKILL);
    wait(10 * kSecond);
  }
}

int ChildProcess::wait(TimeNs patience_ns) {
  link_.reset();
  const SteadyClock clock;
  const TimeNs end = clock.now() + patience_ns;
  while (pid_ > 0) {
    int status = 0;
    if (::waitpid(pid_, &status, WNOHANG) == pid_) {
      pid_ = -1;
      status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    if (pid_ > 0 && clock.now() > end) return -1;
    if (pid_ > 0) ::usleep(1000);
  }
  return status_;
}

void ChildProcess::kill() {
  if (pid_ > 0) ::kill(pid_, SIGKILL);
  wait(10 * kSecond);
}

bool ChildProcess::has_ended() const {
  siginfo_t ended{};
  return pid_ <= 0 ||
         (::waitid(P_PID, static_cast<id_t>(pid_), &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && ended.si_pid == pid_);
}

std::string ChildProcess::last_words() const {
  char buffer[4096];
  // The child has the same file offset. lseek() moves it to the end of the file, where the child's next output goes
  // anyway.
  const off_t size = ::lseek(errors_.get(), 0, SEEK_END);
  const off_t begin = size > static_cast<off_t>(sizeof(buffer)) ? size - static_cast<off_t>(sizeof(buffer)) : 0;
  const ssize_t got = ::pread(errors_.get(), buffer, sizeof(buffer), begin);
  std::string text(buffer, got > 0 ? static_cast<std::size_t>(got) : 0);
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  const std::size_t line = text.rfind('\n');
  return line == std::string::npos ? text : text.substr(line + 1);
}

fs::path own_program() {
  std::error_code failure;
  return fs::read_symlink("/proc/self/exe", failure);
}

std::string kvferry_program() {
  std::error_code failure;
  const fs::path program = own_program().parent_path() / "kvferry";
  if (!fs::exists(program, failure))
    throw Failure({ErrorCode::kUnavailable,
                   fmt::format("the program {}, which the benchmark starts as a controller, does not exist; install "
                               "kvferry again",
                               program.string())});
  return program.string();
}

Command self_command(std::vector<std::string> words) {
  words.insert(words.begin(), own_program());
  return {std::move(words), {}};
}

void run_peer_program(const Command& command, const Json& spec, const Say& say,
                      const std::function<void(const Json&)>& take) {
  ChildProcess child(command);
  // A failure to send is ignored: if the program has ended, receive() fails too, and the error then has the last line
  // of the program's stderr.
  (void)child.link().send(spec);
  while (true) {
    const Result<Json> received = checked(child.link().receive(kLinePatience));
    if (!received && received.error().code == ErrorCode::kPeerLost)
      throw Failure({ErrorCode::kUnavailable,
                     fmt::format("the program {} ended before it had sent its figures; the last line of its stderr: "
                                 "'{}'",
                                 command.words.back(), child.last_words())});
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
    throw Failure({ErrorCode::kUnavailable,
                   fmt::format("can't create a temporary folder {}: {}; set TMPDIR to a folder in which this user may "
                               "create others",
                               path_, failure ? failure.message() : std::strerror(errno))});
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
  // Returns to the system the free memory that malloc() keeps, so that this memory does not count.
  if (pid == ::getpid()) ::malloc_trim(0);
  std::ifstream statm(fmt::format("/proc/{}/statm", pid));
  std::uint64_t size = 0, resident = 0;
  statm >> size >> resident;
  return static_cast<double>(resident) * static_cast<double>(::sysconf(_SC_PAGESIZE));
}

}  // namespace kvferry::bench
