// The values that a scheduler node reports, of which vLLM's /metrics shows those that kvferry/stats.py describes.
#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry {

/// Counters and gauges by metric name, without the kvferry_ prefix. The names live as long as the process.
using NodeMetrics = std::vector<std::pair<std::string_view, double>>;

NodeMetrics metrics_of(const SchedulerCore& core);

}  // namespace kvferry
