// A program that runs for us and ends with us.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "launch/bench/harness/line_link.h"

namespace kvferry::bench {

struct Command {
  std::vector<std::string> words;
  std::vector<std::string> environment;  // NAME=VALUE, over our own
};

/// Speaks lines over the program's stdin and stdout; keeps the end of its stderr. The kernel ends the program when the
/// thread that started it dies; the destructor lets it end by itself, then asks (SIGTERM), then kills.
class ChildProcess {
 public:
  /// kUnavailable: it can't be started.
  static Result<ChildProcess> start(const Command& command);
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&&) = delete;
  ~ChildProcess();

  LineLink& link() { return *link_; }
  /// The last line that it wrote to stderr so far.
  std::string last_words() const;
  /// Ends its stdin and waits. The exit status, or 128 + the signal's number; -1: it still runs.
  int wait(TimeNs patience_ns);
  /// Ends it without a word to it.
  void kill();
  pid_t pid() const { return pid_; }
  bool has_ended() const;  // nobody waited for it yet

 private:
  ChildProcess(pid_t pid, int errors_fd, LineLink link) : pid_(pid), errors_fd_(errors_fd), link_(std::move(link)) {}

  pid_t pid_;
  int errors_fd_;
  std::optional<LineLink> link_;
};

}  // namespace kvferry::bench
