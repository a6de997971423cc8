// How much of a listener's time each member uses. Pure.
#pragma once

#include <string>
#include <unordered_map>

#include "transport/base/clock.h"

namespace kvferry::controller {

// What a member may use of each window while others wait, over all of its connections. One message may exceed it.
constexpr TimeNs kMemberWindow = 100 * kMillisecond;
constexpr TimeNs kMemberTimeMax = kMemberWindow / 2;

/// Threads: one at a time. `now` must never decrease.
class MemberShares {
 public:
  bool is_used_up(const std::string& member, TimeNs now) {
    begin_window_if_due(now);
    const auto used = used_.find(member);
    return used != used_.end() && used->second >= kMemberTimeMax;
  }
  /// Counts the time of one message.
  void add(const std::string& member, TimeNs used, TimeNs now) {
    begin_window_if_due(now);
    used_[member] += used;
  }

 private:
  void begin_window_if_due(TimeNs now) {
    if (now - begun_at_ < kMemberWindow) return;
    begun_at_ = now;
    used_.clear();
  }

  TimeNs begun_at_ = 0;
  std::unordered_map<std::string, TimeNs> used_;
};

}  // namespace kvferry::controller
