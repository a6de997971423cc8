// Starts the programs that a benchmark needs, and reads what Linux reports about a process.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "launch/bench/harness/line_link.h"

namespace kvferry::bench {

struct Command {
  std::vector<std::string> words;
  std::vector<std::string> environment;  // NAME=VALUE, added to this process's own variables
};

/// A program that this process starts. This process and the program exchange lines over the program's stdin and stdout.
/// The program's stderr is kept for last_words(). The kernel sends the program SIGTERM when the thread that started it
/// ends. The destructor closes the program's stdin. If the program still runs 2 s later, the destructor sends it
/// SIGTERM, and 4 s later SIGKILL; after the user's interrupt, it sends SIGTERM at once.
class ChildProcess {
 public:
  /// Throws a Failure kUnavailable if the system can't create the process or its pipes.
  explicit ChildProcess(const Command& command);
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ~ChildProcess();

  LineLink& link() { return *link_; }
  /// Returns the last line that the program has written to stderr.
  std::string last_words() const;
  /// Closes the program's stdin and waits. Returns the exit status, or 128 + the number of the signal that ended the
  /// program, or -1 if the program still runs after `patience_ns`. Later calls return the same status.
  int wait(TimeNs patience_ns);
  /// Sends SIGKILL to the program and waits until it has ended, at most 10 s.
  void kill();
  pid_t pid() const { return pid_; }
  bool has_ended() const;

 private:
  pid_t pid_ = -1;
  int status_ = 0;  // result of wait() once it has seen the program's end
  OwnedFd errors_;
  std::optional<LineLink> link_;
};

/// Returns the path of this program's file.
std::filesystem::path own_program();

/// Returns the path of the program `kvferry` in the folder of this program's file. It is this program itself, unless a
/// test runs. Failures: kUnavailable if there is no such file.
std::string kvferry_program();

/// Returns the command that runs this program with other arguments.
Command self_command(std::vector<std::string> words);

using Say = std::function<void(const std::string&)>;

/// Runs a program of launch/bench/peers: sends `spec`, passes the text of {"step": text} to `say` and every other line
/// to `take`, and returns at {"done": true}. Failures: the errors that the program reports, those of `take`,
/// kUnavailable if the program can't be started or ends before {"done": true}, kCorrupt if a line is not a JSON object,
/// kTimeout, kCancelled.
void run_peer_program(const Command& command, const nlohmann::json& spec, const Say& say,
                      const std::function<void(const nlohmann::json&)>& take);

/// A new folder below the system's folder for temporary files; the destructor removes it.
class TemporaryFolder {
 public:
  /// Throws a Failure kUnavailable if the folder can't be made.
  TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// Returns the processor time of all threads of a process in seconds, 0 if there is no such process.
double cpu_seconds(pid_t pid);
double resident_bytes(pid_t pid);

}  // namespace kvferry::bench
