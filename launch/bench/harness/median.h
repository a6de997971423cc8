// The figure that every repeated measurement is told by.
#pragma once

#include <algorithm>
#include <vector>

namespace kvferry::bench {

/// Of an even number of values the upper one in the middle; there must be one.
inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace kvferry::bench
