// Another process of a test, with which the test speaks in lines over pipes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/base/owned_fd.h"
#include "transport/base/result.h"

namespace kvferry {

class ChildProcess {
 public:
  /// Starts a program of this program's own folder. kUnavailable: it can't be started.
  static Result<std::unique_ptr<ChildProcess>> start(const std::string& program, std::vector<std::string> arguments);
  /// Ends the child's input, and waits until the child has ended.
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  int pid() const { return pid_; }
  void write_line(const std::string& line) const;
  /// Returns the next line of the child; an empty text if the child has ended or said nothing for a minute.
  std::string read_line() const;

 private:
  ChildProcess() = default;
  OwnedFd to_child_, from_child_;
  int pid_ = -1;
};

}  // namespace kvferry
