// A clock that a test sets.
#pragma once

#include "transport/base/clock.h"

namespace kvferry {

class ManualClock final : public Clock {
 public:
  TimeNs now() const override { return now_; }
  void advance(TimeNs by) { now_ += by; }

 private:
  TimeNs now_ = kSecond;
};

}  // namespace kvferry
