// A controller in a child process, filled with the benchmark's load, and two echo servers in the same process.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "launch/bench/harness/controller_load.h"
#include "launch/bench/harness/programs.h"
#include "transport/base/result.h"

namespace kvferry::bench {

class ControllerFarSide {
 public:
  /// Forks, so that no other thread may run in this process. Returns when the load is in the directory. kUnavailable:
  /// the child does not come up.
  static Result<std::unique_ptr<ControllerFarSide>> start(const ControllerLoad& load);
  ControllerFarSide(const ControllerFarSide&) = delete;
  ControllerFarSide& operator=(const ControllerFarSide&) = delete;
  ~ControllerFarSide();

  std::string zmq, stream;            // endpoints of the controller
  std::string zmq_echo, stream_echo;  // endpoints of the echo servers

  /// Processor time of all threads of the child.
  double cpu_s() const { return cpu_seconds(pid_); }

 private:
  explicit ControllerFarSide(TemporaryFolder folder) : folder_(std::move(folder)) {}

  pid_t pid_ = -1;
  TemporaryFolder folder_;
};

}  // namespace kvferry::bench
