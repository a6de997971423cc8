// One size of fleet, from a cold start to a controller that is killed: what each step of it takes.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>

#include "launch/bench/fleet/fleet_controllers.h"
#include "launch/bench/fleet/fleet_nodes.h"

namespace kvferry::bench {

struct FleetStep {
  FleetLoad load;
  FleetControllersOptions controllers;
  TimeNs duration = 0;  // of the steady part
};

constexpr TimeNs kSlowLookup = 10 * kMillisecond;  // a controller whose look-ups take longer is too small

/// Names and numbers of one row. "broke": what did not work any more, or nothing. `begin` hears what is going on.
/// kUnavailable: this machine can't run so many; kCancelled.
Result<nlohmann::json> run_fleet_step(const FleetStep& step, const std::function<void(const std::string&)>& begin);

}  // namespace kvferry::bench
