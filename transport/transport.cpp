#include "transport/transport.h"

#include <poll.h>

#include <algorithm>
#include <limits>

namespace kvferry {

bool Transport::wait(TimeNs timeout_ns) {
  constexpr TimeNs kPollMax = std::numeric_limits<int>::max();
  const TimeNs rounded_up_ms = (timeout_ns + kMillisecond - 1) / kMillisecond;
  pollfd waiting{event_fd(), POLLIN, 0};
  return ::poll(&waiting, 1, static_cast<int>(std::clamp<TimeNs>(rounded_up_ms, 0, kPollMax))) == 1;
}

bool Transport::set_wait_interrupt_fd(int) { return false; }
void Transport::set_source_address(const std::string&) {}

}  // namespace kvferry
