// Starts, kills, stops and continues a program under test, and detects if it died by itself.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace kvferry::faults {

class Program {
 public:
  /// `log_file`: the program's output is appended to it.
  Program(std::vector<std::string> words, std::string log_file) : words_(std::move(words)), log_file_(log_file) {}
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  ~Program() { kill(); }

  void start();
  /// Kills the program with SIGKILL, and waits for its end.
  void kill();
  void stop();   // SIGSTOP
  void go_on();  // SIGCONT
  /// Limits the size of files from now on, which has the same effect on the program as a full disk. 0: no limit.
  void limit_files(std::uint64_t bytes);
  /// Returns how the program ended if it was not by kill(), in words. Returns an empty text if it runs or was killed.
  std::string died();
  bool is_running() const { return pid_ > 0; }
  const std::string& log_file() const { return log_file_; }

 private:
  std::vector<std::string> words_;
  std::string log_file_;
  pid_t pid_ = -1;
};

}  // namespace kvferry::faults
