// A program under test: started, killed, stopped and continued, and asked whether it died by itself.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace kvferry::faults {

/// A TCP port of 127.0.0.1 that was free a moment ago.
std::uint16_t free_port();

class Program {
 public:
  /// `log_file`: where its output goes, appended.
  Program(std::vector<std::string> words, std::string log_file) : words_(std::move(words)), log_file_(log_file) {}
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  ~Program() { kill(); }

  void start();
  /// With SIGKILL; waits for its end.
  void kill();
  void stop();   // SIGSTOP
  void go_on();  // SIGCONT
  /// Files can't grow beyond this from now on: what a full disk does to it. 0: no limit.
  void limit_files(std::uint64_t bytes);
  /// It ended, and not by kill(). How, in words; empty: it runs, or was killed.
  std::string died();
  bool is_running() const { return pid_ > 0; }
  const std::string& log_file() const { return log_file_; }

 private:
  std::vector<std::string> words_;
  std::string log_file_;
  pid_t pid_ = -1;
};

}  // namespace kvferry::faults
