// Turns a caller's ranges into copies: checked against the bounds of both regions, joined where they
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

/// Returns the ranges in their order, without empty ones. A range that continues the previous one in both the local and
/// the remote region is joined to it, because every copy costs a fixed time. kInvalidArgument: a range exceeds
/// local_bytes or remote_bytes; the message names the first one that does.
Result<std::vector<CopyRange>> plan_copies(std::span<const CopyRange> ranges, std::uint64_t local_bytes,
                                           std::uint64_t remote_bytes);

}  // namespace kvferry
