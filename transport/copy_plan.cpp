#include "transport/copy_plan.h"

#include <string_view>

namespace kvferry {
namespace {

Error outside(std::string_view side, std::size_t index, std::uint64_t offset, std::uint64_t bytes,
              std::uint64_t region_bytes) {
  return Error{
      ErrorCode::kInvalidArgument,
      fmt::format("range {} of the transfer covers {} bytes from offset {} on of a {} region that has only {} bytes",
                  index, bytes, offset, side, region_bytes)};
}

}  // namespace

Result<void> check_ranges(std::span<const CopyRange> ranges, std::uint64_t local_bytes, std::uint64_t remote_bytes) {
  for (std::size_t index = 0; index < ranges.size(); ++index) {
    const CopyRange& range = ranges[index];
    if (!is_inside(range.local_offset, range.bytes, local_bytes))
      return outside("local", index, range.local_offset, range.bytes, local_bytes);
    if (!is_inside(range.remote_offset, range.bytes, remote_bytes))
      return outside("remote", index, range.remote_offset, range.bytes, remote_bytes);
  }
  return {};
}

void join_ranges(std::vector<CopyRange>& ranges) {
  auto end = ranges.begin();  // the joined ranges are stored from ranges.begin() up to here
  for (const CopyRange range : ranges) {
    if (range.bytes == 0) continue;
    if (end != ranges.begin()) {
      CopyRange& last = *(end - 1);
      if (last.local_offset + last.bytes == range.local_offset &&
          last.remote_offset + last.bytes == range.remote_offset) {
        last.bytes += range.bytes;
        continue;
      }
    }
    *end++ = range;
  }
  ranges.erase(end, ranges.end());
}

}  // namespace kvferry
