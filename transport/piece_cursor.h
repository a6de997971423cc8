// Cuts the copies of a transfer into pieces, in order, and keeps the position after the last piece taken.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "transport/transport.h"

namespace kvferry {

/// Bytes [at, at + bytes) of one copy of a transfer.
struct Piece {
  std::size_t copy = 0;  // index into the transfer's copies
  std::uint64_t at = 0;
  std::uint64_t bytes = 0;
  bool ends_copy = false;
};

/// Position in a transfer's copies. The methods that need the copies get them as an argument, because Transport::feed()
/// adds to them.
class PieceCursor {
 public:
  PieceCursor() = default;
  PieceCursor(std::size_t copy, std::uint64_t at) : copy_(copy), at_(at) {}

  bool is_at_end(std::span<const CopyRange> copies) const { return copy_ == copies.size(); }
  bool is_at_begin() const { return copy_ == 0 && at_ == 0; }
  bool is_inside_copy() const { return at_ > 0; }
  std::size_t copy() const { return copy_; }
  std::uint64_t at() const { return at_; }

  /// Returns the next bytes of the current copy, at most `bytes_max`. Precondition: !is_at_end().
  Piece take(std::span<const CopyRange> copies, std::uint64_t bytes_max) {
    const std::uint64_t left = copies[copy_].bytes - at_;
    const Piece piece{copy_, at_, std::min(left, bytes_max), left <= bytes_max};
    at_ += piece.bytes;
    if (piece.ends_copy) skip_copy();
    return piece;
  }
  /// Skips the rest of the current copy.
  void skip_copy() {
    ++copy_;
    at_ = 0;
  }
  void skip_empty_copies(std::span<const CopyRange> copies) {
    while (!is_at_end(copies) && copies[copy_].bytes == 0) skip_copy();
  }

 private:
  std::size_t copy_ = 0;
  std::uint64_t at_ = 0;  // number of bytes taken from the current copy
};

}  // namespace kvferry
