#include "transport/copy_plan.h"

#include <string_view>

namespace kvferry {
namespace {

Error outside(std::string_view side, std::size_t index, std::uint64_t offset, std::uint64_t bytes,
              std::uint64_t region_bytes) {
  return Error{ErrorCode::kInvalidArgument,
               fmt::format("range {} of the transfer covers [{}, +{}) of a {} region that has only {} bytes", index,
                           offset, bytes, side, region_bytes)};
}

}  // namespace

Result<std::vector<CopyRange>> plan_copies(std::span<const CopyRange> ranges, std::uint64_t local_bytes,
                                           std::uint64_t remote_bytes) {
  std::vector<CopyRange> copies;
  copies.reserve(ranges.size());
  for (std::size_t index = 0; index < ranges.size(); ++index) {
    const CopyRange& range = ranges[index];
    if (!is_inside(range.local_offset, range.bytes, local_bytes))
      return outside("local", index, range.local_offset, range.bytes, local_bytes);
    if (!is_inside(range.remote_offset, range.bytes, remote_bytes))
      return outside("remote", index, range.remote_offset, range.bytes, remote_bytes);
    if (range.bytes == 0) continue;
    if (!copies.empty() && copies.back().local_offset + copies.back().bytes == range.local_offset &&
        copies.back().remote_offset + copies.back().bytes == range.remote_offset) {
      copies.back().bytes += range.bytes;
    } else {
      copies.push_back(range);
    }
  }
  return copies;
}

}  // namespace kvferry
