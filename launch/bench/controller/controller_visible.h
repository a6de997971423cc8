// How soon others find what a node tells, while it tells a lot.
#pragma once

#include <cstddef>

#include "launch/bench/controller/controller_far_side.h"
#include "launch/bench/controller/controller_report.h"
#include "transport/base/result.h"

namespace kvferry::bench {

constexpr std::size_t kVisibleSteps = 1;

/// kUnavailable: the controller does not answer.
Result<void> measure_visible(const ControllerFarSide& far, ControllerReport& report);

}  // namespace kvferry::bench
