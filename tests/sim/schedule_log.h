// Logs what happens in a schedule, but only in a replay. In a run of many schedules, a log line costs only one branch.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <deque>
#include <string>

#include "transport/base/clock.h"

namespace kvferry::sim {

class ScheduleLog {
 public:
  explicit ScheduleLog(std::size_t num_lines) : num_lines_(num_lines) {}
  /// Sets the time at the beginning of the next lines, which is the time of the schedule's clock.
  void set_time(TimeNs now) { now_ = now; }
  void add(const std::string& line) {
    lines_.push_back(fmt::format("{:6} ms  {}", now_ / kMillisecond, line));
    if (lines_.size() > num_lines_) lines_.pop_front();
  }
  const std::deque<std::string>& lines() const { return lines_; }

 private:
  std::size_t num_lines_;
  TimeNs now_ = 0;
  std::deque<std::string> lines_;
};

/// The log of this thread's schedule; nullptr: no log.
inline thread_local ScheduleLog* listener = nullptr;

template <class... Args>
void tell(fmt::format_string<Args...> text, Args&&... args) {
  if (listener != nullptr) [[unlikely]]
    listener->add(fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace kvferry::sim
