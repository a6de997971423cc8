// A child process that runs a controller, filled with the benchmark's load, and two echo servers.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "launch/bench/harness/controller_load.h"
#include "launch/bench/harness/programs.h"

namespace kvferry::bench {

class ControllerFarSide {
 public:
  /// Forks the child process, so no other thread may be running in this process.
  explicit ControllerFarSide(const ControllerLoad& load);
  ControllerFarSide(const ControllerFarSide&) = delete;
  ControllerFarSide& operator=(const ControllerFarSide&) = delete;
  ~ControllerFarSide();

  /// Returns when the controller's directory contains the load. Failures: the error that the child process reports;
  /// kPeerLost if that process has ended; kTimeout after ten minutes; kCancelled.
  void wait_filled();
  std::string zmq, stream;            // endpoints of the controller
  std::string zmq_echo, stream_echo;  // endpoints of the echo servers

  /// Returns the processor time of all threads of the child process in seconds.
  double cpu_s() const { return cpu_seconds(pid_); }

 private:
  TemporaryFolder folder_;
  pid_t pid_ = -1;
  std::optional<LineLink> child_;
};

}  // namespace kvferry::bench
