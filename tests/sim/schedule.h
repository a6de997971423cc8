// One schedule: runs a world, drawn from a seed, to its end, and checks every promise on the way.
#pragma once

#include <cstdint>

#include "tally.h"

namespace kvferry::sim {

/// Runs the schedule of a seed. Throws Broken, or what the check handler throws, when a promise is broken.
Tally run_schedule(std::uint64_t seed);

}  // namespace kvferry::sim
