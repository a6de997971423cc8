// Computes a chunk's checksum from rows that are read in any order. Private to this folder.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "transport/base/checksum.h"

namespace kvferry {

/// Threads: one owner. The chunk must outlive this object.
class SegmentHashes {
 public:
  explicit SegmentHashes(std::span<const std::byte> chunk)
      : chunk_(chunk), num_segments_((chunk.size() + kSegmentBytes - 1) / kSegmentBytes) {
    hashes_.resize(num_segments_);
    is_known_.resize(num_segments_);
  }

  /// Hashes the segments of kSegmentBytes bytes that lie wholly in `rows`, which must be a part of the chunk. A shorter
  /// last segment is left to checksum().
  void add(std::span<const std::byte> rows) {
    const auto begin = static_cast<std::size_t>(rows.data() - chunk_.data());
    const std::size_t end = (begin + rows.size()) / kSegmentBytes;
    for (std::size_t segment = (begin + kSegmentBytes - 1) / kSegmentBytes; segment < end; ++segment) hash(segment);
  }

  /// Returns chunk_checksum() of the whole chunk. Hashes the segments that no add() has hashed.
  std::uint64_t checksum() {
    for (std::size_t segment = 0; segment < num_segments_; ++segment)
      if (!is_known_[segment]) hash(segment);
    return checksum_of_segments(hashes_, chunk_.size());
  }

 private:
  void hash(std::size_t segment) {
    is_known_[segment] = 1;
    const std::span<const std::byte> bytes = chunk_.subspan(segment * kSegmentBytes);
    if (bytes.size() >= kSegmentBytes) {
      hashes_[segment] = segment_checksum(bytes.first<kSegmentBytes>());
      return;
    }
    std::array<std::byte, kSegmentBytes> last{};
    std::copy(bytes.begin(), bytes.end(), last.begin());
    hashes_[segment] = segment_checksum(last);
  }

  std::span<const std::byte> chunk_;
  std::size_t num_segments_;
  std::vector<std::uint64_t> hashes_;
  std::vector<std::uint8_t> is_known_;
};

}  // namespace kvferry
