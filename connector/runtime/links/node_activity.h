// Sums up what the flight recorder has of this node's transfers, hits, failures and prompts, for the report that the
// controller shows to people.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "connector/core/flight_recorder.h"
#include "controller/api/node_report.h"
#include "transport/base/clock.h"

namespace kvferry {

/// A sum of amounts that decay exponentially: after `kSpan`, 1/e (37 %) of an amount is left.
template <TimeNs kSpan>
class FadingSum {
 public:
  void add(double amount, TimeNs now) {
    sum_ = at(now) + amount;
    at_ = std::max(at_, now);
  }
  double at(TimeNs now) const {
    return sum_ * std::exp(-static_cast<double>(std::max<TimeNs>(0, now - at_)) / static_cast<double>(kSpan));
  }

 private:
  double sum_ = 0;
  TimeNs at_ = 0;
};

/// Not thread-safe: only the thread of NodeLinks uses it.
class NodeActivity {
 public:
  /// Reads the events that were recorded since the last call and not overwritten.
  void read(const FlightRecorder& recorder);
  /// Sets the report's fields about transfers, hits, failures and prompts, but not the number of transfers in progress.
  void add_to(controller::NodeReport& report, TimeNs now) const;

 private:
  static constexpr TimeNs kRateSpan = 3 * kSecond, kHitSpan = 120 * kSecond;
  static constexpr std::size_t kPathsMax = 64, kPrefixesMax = 64;
  // A pull is large if it takes at least this time at the path's limit. Its speed then hardly depends on latencies.
  static constexpr TimeNs kLargePull = 5 * kMillisecond;
  static constexpr std::size_t kLargePullsMin = 4, kLargePullsMax = 16;
  struct Path {
    controller::PathReport sum;
    FadingSum<kRateSpan> bytes;
    std::deque<double> large_pulls;  // speeds of the last large pulls, in GB/s
    TimeNs last_at = 0;
  };
  struct Failure {
    controller::FailureReport report;
    TimeNs at = 0;
  };
  using Prefixes = std::map<std::string, FadingSum<kHitSpan>, std::less<>>;  // [first digits of a prompt's first key]

  void take(const LifeEvent& event);
  void take_transfer(const LifeEvent& event, bool is_push);
  static void take_speed(const LifeEvent& event, Path& path);
  void take_failure(const LifeEvent& event);
  void take_prefix(const LifeEvent& event);

  std::uint64_t read_until_ = 0;  // number of the last event that was read
  FadingSum<kHitSpan> tokens_, local_tokens_, loaded_tokens_;
  std::map<std::pair<std::string, bool>, Path> paths_;  // [endpoint of the peer, is_push]
  Prefixes prefixes_;
  std::deque<Failure> failures_;  // the last failures, the newest first
  std::uint64_t num_failures_ = 0;
};

}  // namespace kvferry
