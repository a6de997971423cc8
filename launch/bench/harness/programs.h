// The programs that a benchmark starts, and what Linux reports about a process.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "launch/bench/harness/child_process.h"

namespace kvferry::bench {

/// This program's file.
std::filesystem::path own_program();

/// This program's file or, in a test, the `kvferry` beside it. Failure kUnavailable: there is none.
std::string kvferry_program();

/// This program with other arguments.
Command self_command(std::vector<std::string> words);

using Say = std::function<void(const std::string&)>;

/// Runs a peer's program: sends `spec`, hands {"step": text} to `say` and every other line to `take` until
/// {"done": true}. Failures: those of the program, of `take`, and kUnavailable if the program ends too early.
void run_peer_program(const Command& command, const nlohmann::json& spec, const Say& say,
                      const std::function<void(const nlohmann::json&)>& take);

/// A new folder below the system's folder for temporary files; the destructor removes it.
class TemporaryFolder {
 public:
  /// Failure kUnavailable: it can't be made.
  TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// Processor time of all threads of a process; 0 if there is no such process.
double cpu_seconds(pid_t pid);
double resident_bytes(pid_t pid);

}  // namespace kvferry::bench
