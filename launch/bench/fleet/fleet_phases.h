// Measures a fleet of one size, in phases from a cold start to a killed controller.
#pragma once

#include <nlohmann/json.hpp>

#include "launch/bench/fleet/fleet_controllers.h"
#include "launch/bench/fleet/fleet_nodes.h"

namespace kvferry::bench {

struct FleetStep {
  FleetLoad load;
  FleetControllersOptions controllers;
  TimeNs duration = 0;  // length of the phase with steady traffic
};

constexpr TimeNs kSlowLookup = 10 * kMillisecond;  // a controller whose lookups have a higher p99 counts as overloaded

/// Returns one row of figures, by name. The figure "broke" is a text that says what failed, or is empty. Calls begin()
/// with each phase's name. Failures: kUnavailable if a controller or a node can't be started, or if a controller does
/// not answer a query of its status; kCancelled.
nlohmann::json run_fleet_step(const FleetStep& step, const Say& begin);

}  // namespace kvferry::bench
