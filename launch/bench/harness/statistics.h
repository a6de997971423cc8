// Statistics of repeated measurements.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace kvferry::bench {

/// Sorts the values and returns the one at index size * percent / 100, at most the largest one; 0 if there are no
/// values.
inline double percentile(std::vector<double>& values, std::size_t percent) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, values.size() * percent / 100)];
}

/// Returns the middle one of the sorted values, or the larger one of the two in the middle.
inline double median(std::vector<double> values) { return percentile(values, 50); }

struct Speed {
  double per_s = 0, us_p50 = 0, us_p99 = 0;
};

/// Returns the rate of operations that took these times one after the other, and percentiles of the times. Sorts
/// `times_us`.
inline Speed speed_of(std::vector<double>& times_us) {
  double total_us = 0;
  for (const double time_us : times_us) total_us += time_us;
  return {static_cast<double>(times_us.size()) * 1e6 / total_us, percentile(times_us, 50), percentile(times_us, 99)};
}

inline Speed median_speed(const std::vector<Speed>& speeds) {
  const auto median_of = [&](double Speed::*field) {
    std::vector<double> values;
    for (const Speed& speed : speeds) values.push_back(speed.*field);
    return median(values);
  };
  return {median_of(&Speed::per_s), median_of(&Speed::us_p50), median_of(&Speed::us_p99)};
}

}  // namespace kvferry::bench
