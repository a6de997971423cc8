// What a look-up takes over the controller's sockets, next to an empty message over the same kind of socket.
#pragma once

#include "launch/bench/controller/controller_load.h"
#include "launch/bench/controller/controller_report.h"
#include "transport/base/result.h"

namespace kvferry::bench {

constexpr std::size_t kRemoteSteps = 8;  // of the progress bar

/// kCorrupt: a look-up answered wrongly; kUnavailable: the server's process does not come up. Single-threaded; see
/// ControllerFarSide.
Result<void> measure_remote(const ControllerLoad& load, ControllerReport& report);

}  // namespace kvferry::bench
