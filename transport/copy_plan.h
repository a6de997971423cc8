// Turns a caller's ranges into copies. The ranges are checked against the bounds of both regions, and joined where they
// touch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "transport/transport.h"

namespace kvferry {

inline bool is_inside(std::uint64_t offset, std::uint64_t bytes, std::uint64_t region_bytes) {
  return offset <= region_bytes && bytes <= region_bytes - offset;
}

/// Returns the ranges in their order, without empty ones. A range that directly follows the previous range in both the
/// local and the remote region is joined to it, because every copy costs a fixed time. kInvalidArgument: a range
/// exceeds local_bytes or remote_bytes; the message names the first such range.
Result<std::vector<CopyRange>> plan_copies(std::span<const CopyRange> ranges, std::uint64_t local_bytes,
                                           std::uint64_t remote_bytes);

}  // namespace kvferry
