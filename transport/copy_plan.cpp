#include "transport/copy_plan.h"

#include <algorithm>
#include <limits>
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

Result<bool> check_ranges(std::span<const CopyRange> ranges, std::uint64_t local_bytes, std::uint64_t remote_bytes) {
  // One pass without branches, because a transfer may have many thousands of ranges, nearly all of them good and apart.
  constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();
  bool exceeds = false, joins = false;
  std::uint64_t local_end = kNone, remote_end = kNone;  // where the range before ended
  for (const CopyRange& range : ranges) {
    exceeds |= (range.local_offset > local_bytes) | (range.bytes > local_bytes - range.local_offset) |
               (range.remote_offset > remote_bytes) | (range.bytes > remote_bytes - range.remote_offset);
    joins |= (range.bytes == 0) | ((range.local_offset == local_end) & (range.remote_offset == remote_end));
    local_end = range.local_offset + range.bytes;
    remote_end = range.remote_offset + range.bytes;
  }
  if (!exceeds) return joins;
  const auto is_locally_inside = [&](const CopyRange& range) {
    return is_inside(range.local_offset, range.bytes, local_bytes);
  };
  const auto bad = std::ranges::find_if(ranges, [&](const CopyRange& range) {
    return !is_locally_inside(range) || !is_inside(range.remote_offset, range.bytes, remote_bytes);
  });
  const auto index = static_cast<std::size_t>(bad - ranges.begin());
  if (!is_locally_inside(*bad)) return outside("local", index, bad->local_offset, bad->bytes, local_bytes);
  return outside("remote", index, bad->remote_offset, bad->bytes, remote_bytes);
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
