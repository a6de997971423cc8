// One schedule: a world drawn from a seed, lived through to its end, with every promise asserted on the way.
#pragma once

#include <cstdint>

#include "tally.h"

namespace kvferry::sim {

/// Throws Broken, or what the check handler throws, when a promise is broken.
Tally run_schedule(std::uint64_t seed);

}  // namespace kvferry::sim
