// From the ranges a caller names to the copies a backend posts: checked on both sides, joined where they touch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "transport/transport.h"

namespace kvferry {

inline bool is_inside(std::uint64_t offset, std::uint64_t bytes, std::uint64_t region_bytes) {
  return offset <= region_bytes && bytes <= region_bytes - offset;
}

/// Keeps the order, drops empty ranges and joins a range with the one before it where both its offsets go on from there
/// (a paged cache names many small neighbours, and every operation costs a fixed time).
/// Errors: kInvalidArgument names the first range that leaves a region of local_bytes or remote_bytes.
Result<std::vector<CopyRange>> plan_copies(std::span<const CopyRange> ranges, std::uint64_t local_bytes,
                                           std::uint64_t remote_bytes);

}  // namespace kvferry
