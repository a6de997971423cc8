// Turns a caller's ranges into copies: checked against both sides' bounds, joined where they touch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "transport/transport.h"

namespace kvferry {

inline bool is_inside(std::uint64_t offset, std::uint64_t bytes, std::uint64_t region_bytes) {
  return offset <= region_bytes && bytes <= region_bytes - offset;
}

/// Returns the ranges in their order, without empty ones. Neighbours whose offsets continue on both sides are joined,
/// because every operation costs a fixed time. kInvalidArgument: a range exceeds local_bytes or remote_bytes; the
/// message names the first such range.
Result<std::vector<CopyRange>> plan_copies(std::span<const CopyRange> ranges, std::uint64_t local_bytes,
                                           std::uint64_t remote_bytes);

}  // namespace kvferry
