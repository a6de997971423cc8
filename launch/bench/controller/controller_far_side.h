// A controller in a process of its own, filled with the benchmark's load, and two echoes beside it.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "launch/bench/controller/controller_load.h"
#include "transport/base/result.h"

namespace kvferry::bench {

class ControllerFarSide {
 public:
  /// Forks, so that no other thread may run here. Blocks until the load is in. kUnavailable: it does not come up.
  static Result<std::unique_ptr<ControllerFarSide>> start(const ControllerLoad& load);
  ControllerFarSide(const ControllerFarSide&) = delete;
  ControllerFarSide& operator=(const ControllerFarSide&) = delete;
  ~ControllerFarSide();

  std::string zmq, stream;            // where the controller listens
  std::string zmq_echo, stream_echo;  // where what comes goes back

  /// All its threads since it began.
  double cpu_s() const;

 private:
  ControllerFarSide() = default;

  pid_t pid_ = -1;
  std::string folder_;
};

}  // namespace kvferry::bench
