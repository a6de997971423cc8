// A transfer of this side, cut into segments that its link deals to connections.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/transfer_table.h"
#include "transport/tcp/range_checker.h"

namespace kvferry::tcp {

/// `bytes` from copy `copy`, byte `at` of it, on; over the following copies too.
struct Segment {
  std::size_t copy = 0;
  std::uint64_t at = 0;
  std::uint64_t bytes = 0;
  std::uint32_t num_pieces = 0;
};

class OutTransfer {
 public:
  explicit OutTransfer(AcceptedTransfer accepted);

  const AcceptedTransfer& what() const { return what_; }
  bool has_checksums() const { return !what_.checksums.empty(); }
  void feed(FedCopies more);

  /// The next segment for lane `lane`. A range with a checksum that doesn't fit stays with its lane, in order, so that
  /// it can be checked as it comes. False: nothing for this lane.
  bool take(std::size_t lane, std::uint64_t bytes_max, Segment& segment);
  /// No bytes are left to be taken, by any lane.
  bool is_dealt() const { return next_copy_ == what_.copies.size() && carries_.empty(); }
  std::uint64_t bytes_left() const { return bytes_left_; }

  /// Calls with (index of the copy, offset in it, bytes, whether the copy ends there) for each part of a copy.
  template <class Call>
  void for_each_piece(const Segment& segment, Call call) const {
    std::uint64_t left = segment.bytes;
    std::uint64_t at = segment.at;
    for (std::size_t copy = segment.copy; left > 0; ++copy, at = 0) {
      const std::uint64_t bytes = std::min(left, what_.copies[copy].bytes - at);
      if (bytes == 0) continue;
      call(copy, at, bytes, at + bytes == what_.copies[copy].bytes);
      left -= bytes;
    }
  }

  /// A piece of copy `copy` has come by this lane; a wrong one is noted in `corrupt`.
  void check(std::size_t lane, std::size_t copy, std::span<const std::byte> bytes, bool ends);

  std::uint32_t num_segments = 0;  // of a push: handed to connections
  std::uint32_t num_requests = 0;  // of a pull: asked for and not here
  bool is_final_sent = false;
  std::vector<std::uint32_t> corrupt;

 private:
  struct Carry {
    std::size_t copy = 0;
    std::uint64_t at = 0;
  };
  void note_empty_ranges(std::size_t from);

  AcceptedTransfer what_;
  std::size_t next_copy_ = 0;
  std::uint64_t next_at_ = 0;
  std::uint64_t bytes_left_ = 0;
  std::unordered_map<std::size_t, Carry> carries_;  // by lane
  std::unordered_map<std::size_t, RangeChecker> checkers_;
};

}  // namespace kvferry::tcp
