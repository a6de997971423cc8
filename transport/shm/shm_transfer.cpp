#include "transport/shm/shm_transfer.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "transport/copy_plan.h"
#include "transport/shm/block_copy.h"

namespace kvferry::shm {
namespace {

constexpr std::uint64_t kCacheBytes = std::uint64_t{1} << 20;  // more than this at once doesn't stay in a core's cache
constexpr std::uint64_t kPieceBytes = std::uint64_t{2} << 20;  // a thread
// A slice with a checksum is still in the cache when it is hashed, and who is done first does not wait long.
constexpr std::uint64_t kPartBytes = std::uint64_t{128} << 10;

}  // namespace

void ShmTransfer::feed(FedCopies more) {
  accepted_.copies.insert(accepted_.copies.end(), more.copies.begin(), more.copies.end());
  accepted_.checksums.insert(accepted_.checksums.end(), more.checksums.begin(), more.checksums.end());
  accepted_.is_complete = more.is_last;
}

std::uint64_t ShmTransfer::bytes_left() const {
  const auto add = [](std::uint64_t sum, const CopyRange& copy) { return sum + copy.bytes; };
  return std::accumulate(accepted_.copies.begin() + static_cast<std::ptrdiff_t>(next_), accepted_.copies.end(),
                         std::uint64_t{0}, add) -
         next_bytes_;
}

void ShmTransfer::cut_piece(std::uint64_t bytes_max) {
  slices_.clear();
  parts_.clear();
  std::uint64_t part_bytes = 0;
  while (bytes_max > 0 && next_ < accepted_.copies.size()) {
    const CopyRange& copy = accepted_.copies[next_];
    const bool may_begin_part = next_bytes_ == 0 || !has_checksums();  // a range is hashed by one thread
    if (parts_.empty() || (part_bytes >= kPartBytes && may_begin_part)) {
      parts_.push_back({slices_.size(), 0, static_cast<std::uint32_t>(next_), {}, {}});
      part_bytes = 0;
    }
    const std::uint64_t bytes = std::min({copy.bytes - next_bytes_, bytes_max, kPartBytes});
    slices_.push_back({copy.local_offset + next_bytes_, copy.remote_offset + next_bytes_, bytes});
    parts_.back().end = slices_.size();
    part_bytes += bytes;
    bytes_max -= bytes;
    next_bytes_ += bytes;
    if (next_bytes_ == copy.bytes) {
      ++next_;
      next_bytes_ = 0;
    }
  }
}

Result<void> ShmTransfer::copy_piece(const RemoteMemory& remote, CopyThreadPool& crew) {
  const std::uint64_t offset = accepted_.remote.base - key_.region_base;  // of the grant in its region
  if (remote.mapped_region != nullptr && !is_inside(offset, accepted_.remote.bytes, remote.mapped_bytes))
    return Error{ErrorCode::kRefused, "the peer's mapping is shorter than its descriptor says"};
  if (next_ == 0 && next_bytes_ == 0) bypass_cache_ = !has_checksums() && bytes_left() > kCacheBytes;
  cut_piece(kPieceBytes * crew.num_threads());
  crew.share(parts_.size(), [&](std::size_t part) { copy_part(parts_[part], remote); });
  for (Part& part : parts_) {
    if (!part.result) return std::move(part.result);
    corrupt_ranges_.insert(corrupt_ranges_.end(), part.corrupt_ranges.begin(), part.corrupt_ranges.end());
  }
  return {};
}

void ShmTransfer::copy_part(Part& part, const RemoteMemory& remote) {
  const std::span<const CopyRange> slices = std::span(slices_).subspan(part.begin, part.end - part.begin);
  if (!has_checksums()) {
    part.result = copy(slices, remote);
    return;
  }
  std::optional<ChecksumStream> unfinished;
  if (part.begin == 0) unfinished = std::exchange(unfinished_, std::nullopt);
  std::uint32_t range = part.first_range;
  std::size_t at = 0;
  while (at < slices.size() && part.result) {
    std::size_t end = at;
    for (std::uint64_t bytes = 0; end < slices.size() && bytes < kPartBytes; ++end) bytes += slices[end].bytes;
    const std::span<const CopyRange> hot = slices.subspan(at, end - at);
    part.result = copy(hot, remote);
    if (part.result) check(hot, range, unfinished, part.corrupt_ranges);
    at = end;
  }
  if (part.end == slices_.size()) unfinished_ = std::move(unfinished);
}

Result<void> ShmTransfer::copy(std::span<const CopyRange> slices, const RemoteMemory& remote) const {
  if (remote.mapped_region == nullptr)
    return copy_by_cma(slices, accepted_.local_base, accepted_.remote.base, accepted_.direction, remote.pid);
  std::byte* const base = remote.mapped_region + (accepted_.remote.base - key_.region_base);
  copy_mapped(slices, accepted_.local_base, base, accepted_.direction, bypass_cache_);
  return {};
}

void ShmTransfer::check(std::span<const CopyRange> slices, std::uint32_t& range,
                        std::optional<ChecksumStream>& unfinished, std::vector<std::uint32_t>& corrupt_ranges) const {
  // A pull's bytes are hashed where they arrived. A push's are hashed at their source: reading back what was just
  // written there would prove no more.
  for (const CopyRange& slice : slices) {
    if (!unfinished) unfinished.emplace();
    unfinished->update({accepted_.local_base + slice.local_offset, slice.bytes});
    const CopyRange& whole = accepted_.copies[range];
    if (slice.local_offset + slice.bytes != whole.local_offset + whole.bytes) continue;
    if (unfinished->digest() != accepted_.checksums[range]) corrupt_ranges.push_back(range);
    unfinished.reset();
    ++range;
  }
}

}  // namespace kvferry::shm
