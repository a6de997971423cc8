// Turns a caller's ranges into copies: checks them against the bounds of both regions, and joins them where they touch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "transport/transport.h"

namespace kvferry {

inline bool is_inside(std::uint64_t offset, std::uint64_t bytes, std::uint64_t region_bytes) {
  return offset <= region_bytes && bytes <= region_bytes - offset;
}

/// Returns whether join_ranges() would change the ranges. kInvalidArgument: a range exceeds local_bytes or
/// remote_bytes; the message names the first such range.
Result<bool> check_ranges(std::span<const CopyRange> ranges, std::uint64_t local_bytes, std::uint64_t remote_bytes);

/// Removes empty ranges. Joins a range to the previous one if it directly follows that one in both the local and the
/// remote region, because every copy has a fixed cost besides that of its bytes.
void join_ranges(std::vector<CopyRange>& ranges);

}  // namespace kvferry
