// What the controller's index and directory do on one core, in this process.
#pragma once

#include "launch/bench/controller/controller_load.h"
#include "launch/bench/controller/controller_report.h"
#include "transport/base/result.h"

namespace kvferry::bench {

constexpr std::size_t kLocalSteps = 14;  // of the progress bar

/// kCorrupt: a look-up answered wrongly. Single-threaded.
Result<void> measure_local(const ControllerLoad& load, ControllerReport& report);

}  // namespace kvferry::bench
