#include "transport/shm/shm_transfer.h"

#include <algorithm>
#include <numeric>

#include "transport/copy_plan.h"
#include "transport/shm/block_copy.h"

namespace kvferry::shm {
namespace {

constexpr std::uint64_t kCacheBytes = std::uint64_t{1} << 20;  // more than this at once doesn't stay in a core's cache

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

std::span<const CopyRange> ShmTransfer::next_piece(std::uint64_t bytes_max) {
  piece_.clear();
  while (bytes_max > 0 && next_ < accepted_.copies.size()) {
    const CopyRange& copy = accepted_.copies[next_];
    const std::uint64_t bytes = std::min(copy.bytes - next_bytes_, bytes_max);
    piece_.push_back({copy.local_offset + next_bytes_, copy.remote_offset + next_bytes_, bytes});
    bytes_max -= bytes;
    next_bytes_ += bytes;
    if (next_bytes_ == copy.bytes) {
      ++next_;
      next_bytes_ = 0;
    }
  }
  return piece_;
}

Result<void> ShmTransfer::copy_piece(const RemoteMemory& remote, std::uint64_t bytes_max) {
  const std::uint64_t offset = accepted_.remote.base - key_.region_base;  // of the grant in its region
  if (remote.mapped_region != nullptr && !is_inside(offset, accepted_.remote.bytes, remote.mapped_bytes))
    return Error{ErrorCode::kRefused, "the peer's mapping is shorter than its descriptor says"};
  if (next_ == 0 && next_bytes_ == 0) bypass_cache_ = bytes_left() > kCacheBytes;
  if (!accepted_.checksums.empty()) bytes_max = std::min(bytes_max, kCacheBytes / 4);  // so that it is hot when hashed
  const std::span<const CopyRange> piece = next_piece(bytes_max);
  if (remote.mapped_region != nullptr) {
    copy_mapped(piece, accepted_.local_base, remote.mapped_region + offset, accepted_.direction,
                bypass_cache_ && accepted_.checksums.empty());
  } else if (Result<void> ok =
                 copy_by_cma(piece, accepted_.local_base, accepted_.remote.base, accepted_.direction, remote.pid);
             !ok) {
    return ok;
  }
  if (!accepted_.checksums.empty()) check(piece);
  return {};
}

void ShmTransfer::check(std::span<const CopyRange> piece) {
  // A pull's bytes are hashed where they arrived. A push's are hashed at their source: reading back what was just
  // written there would prove no more.
  for (const CopyRange& part : piece) {
    if (!checksum_) checksum_.emplace();
    checksum_->update({accepted_.local_base + part.local_offset, part.bytes});
    const CopyRange& whole = accepted_.copies[checked_];
    if (part.local_offset + part.bytes != whole.local_offset + whole.bytes) continue;
    if (checksum_->digest() != accepted_.checksums[checked_]) corrupt_ranges_.push_back(checked_);
    checksum_.reset();
    ++checked_;
  }
}

}  // namespace kvferry::shm
