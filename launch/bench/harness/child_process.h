// A child process that ends with its parent.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "launch/bench/harness/line_link.h"

namespace kvferry::bench {

struct Command {
  std::vector<std::string> words;
  std::vector<std::string> environment;  // NAME=VALUE, added to this process's own variables
};

/// Exchanges lines with the program over its stdin and stdout, and keeps its stderr. The kernel ends the program when
/// the thread that started it dies. The destructor waits for the program to end, then sends SIGTERM, then SIGKILL.
class ChildProcess {
 public:
  /// Failure kUnavailable: no process or pipe is left.
  explicit ChildProcess(const Command& command);
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ~ChildProcess();

  LineLink& link() { return *link_; }
  /// The last line that the program has written to stderr.
  std::string last_words() const;
  /// Closes the program's stdin and waits. Returns the exit status, 128 + the number of the signal that ended the
  /// program, or -1 if it still runs.
  int wait(TimeNs patience_ns);
  /// Sends SIGKILL and waits.
  void kill();
  pid_t pid() const { return pid_; }
  bool has_ended() const;

 private:
  pid_t pid_ = -1;
  OwnedFd errors_;
  std::optional<LineLink> link_;
};

}  // namespace kvferry::bench
