#include "connector/runtime/scheduler/node_metrics.h"

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <string>

namespace kvferry {
namespace {

/// Returns the metric name of the counter of tokens that were computed again for this cause.
std::string_view recomputed_name(std::size_t cause) {
  static const auto names = [] {
    std::array<std::string, kNumCauses> made;
    for (std::size_t i = 0; i < kNumCauses; ++i) made[i] = fmt::format("recomputed_tokens_total{{{}}}", kCauseNames[i]);
    return made;
  }();
  return names[cause];
}

}  // namespace

NodeMetrics metrics_of(const SchedulerCore& core) {
  const CoreCounters& counters = core.counters();
  const auto number = [](auto value) { return static_cast<double>(value); };
  NodeMetrics metrics = {
#define KVFERRY_METRIC(name) {#name "_total", number(counters.name)},
      KVFERRY_CORE_COUNTERS(KVFERRY_METRIC)
#undef KVFERRY_METRIC
          {"pool_chunks", number(core.pool().num_ready())},
      {"pool_slots", number(core.pool().num_slots())},
      {"pool_pinned_chunks", number(core.pool().num_pinned())},
      {"pool_tenants", number(core.pool().tenants().num_tenants())},
      {"pool_controller_pinned_chunks", number(core.num_controller_pinned())},
      {"fetching_requests", number(core.num_fetches())},
      {"open_pushes", number(core.num_pushes())},
      {"open_push_reservations", number(core.num_reservations())},
  };
  for (std::size_t cause = 0; cause < kNumCauses; ++cause)
    if (const std::uint64_t tokens = counters.recomputed_tokens[cause]; tokens > 0)
      metrics.emplace_back(recomputed_name(cause), number(tokens));
  return metrics;
}

}  // namespace kvferry
