#include "program.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <stdexcept>

namespace kvferry::faults {

void Program::start() {
  std::vector<char*> words;
  for (std::string& word : words_) words.push_back(word.data());
  words.push_back(nullptr);
  pid_ = ::fork();
  if (pid_ < 0) throw std::runtime_error("fork failed");
  if (pid_ > 0) return;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int log = ::open(log_file_.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
  ::dup2(log, STDOUT_FILENO);
  ::dup2(log, STDERR_FILENO);
  ::execvp(words[0], words.data());
  ::_exit(127);
}

void Program::kill() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

void Program::stop() {
  if (pid_ > 0) ::kill(pid_, SIGSTOP);
}

void Program::go_on() {
  if (pid_ > 0) ::kill(pid_, SIGCONT);
}

void Program::limit_files(std::uint64_t bytes) {
  if (pid_ <= 0) return;
  const rlimit limit{bytes == 0 ? RLIM_INFINITY : bytes, RLIM_INFINITY};
  ::prlimit(pid_, RLIMIT_FSIZE, &limit, nullptr);
}

std::string Program::died() {
  int status = 0;
  if (pid_ <= 0 || ::waitpid(pid_, &status, WNOHANG) != pid_) return {};
  pid_ = -1;
  return fmt::format("{} {} (its log: {})", words_[0],
                     WIFSIGNALED(status) ? fmt::format("was ended by signal {}", WTERMSIG(status))
                                         : fmt::format("exited with {}", WEXITSTATUS(status)),
                     log_file_);
}

}  // namespace kvferry::faults
