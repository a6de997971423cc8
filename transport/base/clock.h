// Time as an argument: pure functions and state machines take a TimeNs, the code that runs them takes a Clock.
#pragma once

#include <chrono>
#include <cstdint>

namespace kvferry {

using TimeNs = std::int64_t;  // nanoseconds of a monotonic clock with an arbitrary zero point
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
