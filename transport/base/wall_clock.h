// The time of day, for times that other processes, hosts or people read; durations and deadlines use clock.h.
#pragma once

#include <chrono>
#include <cstdint>

namespace kvferry {

/// A function that returns a host's wall clock, in milliseconds since 1970.
using WallClock = std::int64_t (*)();

/// The WallClock of this host.
inline std::int64_t wall_clock_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace kvferry
