// How soon a controller serves again after its process was killed, with its state and without.
#pragma once

#include <cstddef>

#include "launch/bench/controller/controller_load.h"
#include "launch/bench/controller/controller_report.h"
#include "transport/base/result.h"

namespace kvferry::bench {

constexpr std::size_t kRecoverySteps = 1;

/// Starts this program as a controller, in a folder of its own under the system's for temporary files; takes down what
/// it starts. kCorrupt: a wrong answer; then no figure is worth anything.
Result<void> measure_recovery(const ControllerLoad& load, ControllerReport& report);

}  // namespace kvferry::bench
