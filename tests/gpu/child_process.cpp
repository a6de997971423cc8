#include "tests/gpu/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <string_view>

#include "transport/base/check.h"

extern char** environ;

namespace kvferry {

namespace {
constexpr int kPatienceMs = 60'000;
}  // namespace

Result<std::unique_ptr<ChildProcess>> ChildProcess::start(const std::string& program,
                                                          std::vector<std::string> arguments) {
  int to_child[2], from_child[2];
  KVFERRY_CHECK(::pipe2(to_child, O_CLOEXEC) == 0 && ::pipe2(from_child, O_CLOEXEC) == 0, "no pipes");
  std::unique_ptr<ChildProcess> child(new ChildProcess);
  child->to_child_ = OwnedFd(to_child[1]);
  child->from_child_ = OwnedFd(from_child[0]);
  const OwnedFd input(to_child[0]), output(from_child[1]);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, input.get(), STDIN_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, output.get(), STDOUT_FILENO);
  std::string path = std::filesystem::read_symlink("/proc/self/exe").parent_path() / program;
  std::vector<char*> words = {path.data()};
  for (std::string& argument : arguments) words.push_back(argument.data());
  words.push_back(nullptr);
  const int code = ::posix_spawn(&child->pid_, path.c_str(), &actions, nullptr, words.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  if (code == 0) return child;
  child->pid_ = -1;
  return Error{ErrorCode::kUnavailable, fmt::format("{} can't be started: error {}", path, code)};
}

ChildProcess::~ChildProcess() {
  to_child_ = OwnedFd();
  if (pid_ > 0) ::waitpid(pid_, nullptr, 0);
}

void ChildProcess::write_line(const std::string& line) const {
  const std::string whole = line + "\n";
  std::string_view left = whole;
  while (!left.empty()) {
    const ssize_t written = ::write(to_child_.get(), left.data(), left.size());
    if (written <= 0) return;  // the child has ended, which read_line() tells
    left.remove_prefix(static_cast<std::size_t>(written));
  }
}

std::string ChildProcess::read_line() const {
  std::string line;
  char c = 0;
  pollfd ready{from_child_.get(), POLLIN, 0};
  while (::poll(&ready, 1, kPatienceMs) > 0 && ::read(from_child_.get(), &c, 1) == 1 && c != '\n') line += c;
  return line;
}

}  // namespace kvferry
