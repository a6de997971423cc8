#include "transport/shm/shm_transfer.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "transport/copy_plan.h"
#include "transport/shm/block_copy.h"

namespace kvferry::shm {
namespace {

constexpr std::uint64_t kCacheBytes = std::uint64_t{1} << 20;  // assumed size of a core's cache
constexpr std::uint64_t kPieceBytes = std::uint64_t{2} << 20;  // limit on a piece's bytes, for each copying thread
// Limit of a slice, and the size at which a part is full. The limit is so small that a slice is still in the cache when
// it is hashed.
constexpr std::uint64_t kPartBytes = std::uint64_t{128} << 10;

}  // namespace

std::uint64_t ShmTransfer::bytes_left() const {
  const auto add = [](std::uint64_t sum, const CopyRange& copy) { return sum + copy.bytes; };
  return std::accumulate(accepted_.copies.begin() + static_cast<std::ptrdiff_t>(cursor_.copy()), accepted_.copies.end(),
                         std::uint64_t{0}, add) -
         cursor_.at();
}

void ShmTransfer::cut_piece(std::uint64_t bytes_max) {
  slices_.clear();
  parts_.clear();
  std::uint64_t part_bytes = 0;
  while (bytes_max > 0 && has_copies()) {
    // A range with a checksum is hashed in order, so all of its bytes that are in this piece go into one part.
    const bool may_begin_part = !cursor_.is_inside_copy() || !has_checksums();
    if (parts_.empty() || (part_bytes >= kPartBytes && may_begin_part)) {
      parts_.push_back({slices_.size(), 0, static_cast<std::uint32_t>(cursor_.copy()), {}, {}});
      part_bytes = 0;
    }
    const Piece piece = cursor_.take(accepted_.copies, std::min(bytes_max, kPartBytes));
    const CopyRange& copy = accepted_.copies[piece.copy];
    slices_.push_back({copy.local_offset + piece.at, copy.remote_offset + piece.at, piece.bytes});
    parts_.back().end = slices_.size();
    part_bytes += piece.bytes;
    bytes_max -= piece.bytes;
  }
}

Result<void> ShmTransfer::copy_piece(const RemoteMemory& remote, CopyThreadPool& threads) {
  const std::uint64_t offset = accepted_.remote.base - key_.region_base;  // offset of the grant in its region
  if (remote.mapped_region != nullptr && !is_inside(offset, accepted_.remote.bytes, remote.mapped_bytes))
    return Error{
        ErrorCode::kRefused,
        fmt::format("the peer's mapped memory has {} bytes, but the peer describes it as {} bytes from offset {} on",
                    remote.mapped_bytes, accepted_.remote.bytes, offset)};
  if (cursor_.is_at_begin()) bypass_cache_ = !has_checksums() && bytes_left() > kCacheBytes;
  cut_piece(kPieceBytes * threads.num_threads());
  threads.share(parts_.size(), [&](std::size_t part) { copy_part(parts_[part], remote); });
  for (Part& part : parts_) {
    if (!part.result) return std::move(part.result);
    for (const std::uint32_t range : part.corrupt_ranges) verifier_.mark_corrupt(range);
  }
  return {};
}

void ShmTransfer::copy_part(Part& part, const RemoteMemory& remote) {
  const std::span<const CopyRange> slices = std::span(slices_).subspan(part.begin, part.end - part.begin);
  if (!has_checksums()) {
    part.result = copy(slices, remote);
    return;
  }
  RangeDigest digest;
  if (part.begin == 0) digest = std::exchange(unfinished_, {});
  std::uint32_t range = part.first_range;
  std::size_t at = 0;
  while (at < slices.size() && part.result) {
    std::size_t end = at;
    for (std::uint64_t bytes = 0; end < slices.size() && bytes < kPartBytes; ++end) bytes += slices[end].bytes;
    const std::span<const CopyRange> hot = slices.subspan(at, end - at);
    part.result = copy(hot, remote);
    if (part.result) check(hot, range, digest, part.corrupt_ranges);
    at = end;
  }
  if (part.end == slices_.size()) unfinished_ = std::move(digest);
}

Result<void> ShmTransfer::copy(std::span<const CopyRange> slices, const RemoteMemory& remote) const {
  if (remote.mapped_region == nullptr)
    return copy_by_cma(slices, accepted_.local_base, accepted_.remote.base, accepted_.direction, remote.pid);
  std::byte* const base = remote.mapped_region + (accepted_.remote.base - key_.region_base);
  copy_mapped(slices, accepted_.local_base, base, accepted_.direction, bypass_cache_);
  return {};
}

void ShmTransfer::check(std::span<const CopyRange> slices, std::uint32_t& range, RangeDigest& digest,
                        std::vector<std::uint32_t>& corrupt_ranges) const {
  // The bytes are always hashed in this process's memory: a pull's bytes where they arrived, a push's at their source.
  for (const CopyRange& slice : slices) {
    const CopyRange& whole = accepted_.copies[range];
    const bool ends_range = slice.local_offset + slice.bytes == whole.local_offset + whole.bytes;
    const auto checksum = digest.add({accepted_.local_base + slice.local_offset, slice.bytes}, ends_range);
    if (!ends_range) continue;
    if (*checksum != accepted_.checksums[range]) corrupt_ranges.push_back(range);
    ++range;
  }
}

}  // namespace kvferry::shm
