// Time is an argument: state machines get the time as a TimeNs, and the code that runs them reads it from a Clock.
#pragma once

#include <chrono>
#include <cstdint>

namespace kvferry {

/// A time or a duration in nanoseconds. The zero point of times is arbitrary, and the clock is monotonic.
using TimeNs = std::int64_t;
constexpr TimeNs kMillisecond = 1'000'000;
constexpr TimeNs kSecond = 1'000 * kMillisecond;

class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimeNs now() const = 0;
};

class SteadyClock final : public Clock {
 public:
  TimeNs now() const override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
};

}  // namespace kvferry
