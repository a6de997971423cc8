// The checksum of ranges whose bytes come one after another in pieces of any size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "transport/base/checksum.h"

namespace kvferry::tcp {

/// Of one transfer on one connection.
class RangeChecker {
 public:
  /// With `ends` the range's checksum, and the next piece begins another.
  std::optional<std::uint64_t> add(std::span<const std::byte> bytes, bool ends) {
    if (ends && !stream_) return chunk_checksum(bytes);
    if (!stream_) stream_.emplace();
    stream_->update(bytes);
    if (!ends) return std::nullopt;
    const std::uint64_t digest = stream_->digest();
    stream_.reset();
    return digest;
  }

 private:
  std::optional<ChecksumStream> stream_;
};

}  // namespace kvferry::tcp
