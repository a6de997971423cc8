// A transfer that this node has submitted, cut into segments that its link assigns to connections (lanes).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/piece_cursor.h"
#include "transport/range_verifier.h"
#include "transport/tcp/connection.h"
#include "transport/transfer_table.h"

namespace kvferry::tcp {

/// `bytes` bytes from byte `at` of copy `copy` on, which may continue in the following copies.
struct Segment {
  std::size_t copy = 0;
  std::uint64_t at = 0;
  std::uint64_t bytes = 0;
  std::uint32_t num_pieces = 0;  // number of copies that have bytes in the segment
};

class OutTransfer {
 public:
  explicit OutTransfer(AcceptedTransfer accepted);

  const AcceptedTransfer& what() const { return what_; }
  bool has_checksums() const { return what_.has_checksums(); }
  void feed(const FedCopies& more);

  /// Assigns the next segment to lane `lane`. If a range has a checksum and does not fit into the segment, the rest of
  /// the range goes to the same lane, so that the range's bytes arrive in order and can be hashed on arrival. Returns
  /// false if this lane gets nothing.
  bool take(std::size_t lane, std::uint64_t bytes_max, Segment& segment);
  /// Returns true if all bytes that were submitted and fed are assigned to lanes.
  bool is_dealt() const { return cursor_.is_at_end(what_.copies) && carries_.empty(); }
  std::uint64_t bytes_left() const { return bytes_left_; }

  /// Calls `call` with each Piece of the segment.
  template <class Call>
  void for_each_piece(const Segment& segment, Call call) const {
    PieceCursor cursor(segment.copy, segment.at);
    for (std::uint64_t left = segment.bytes; left > 0;) {
      const Piece piece = cursor.take(what_.copies, left);
      left -= piece.bytes;
      if (piece.bytes > 0) call(piece);
    }
  }

  /// Hashes bytes of copy `copy` that have arrived on lane `lane`. If they are the copy's last bytes (`ends_copy`),
  /// compares the copy's checksum.
  void check(std::size_t lane, std::size_t copy, std::span<const std::byte> bytes, bool ends_copy);

  /// Appends the message that pushes a segment and, if it is the last one, ends the push.
  void append_push(const Segment& segment, OutMessage& out);
  /// Appends the request for a segment.
  void append_pull(const Segment& segment, std::uint32_t request, OutMessage& out) const;

  RangeVerifier verifier{what_};
  std::uint32_t num_segments = 0;  // number of segments given to connections, in a push
  std::uint32_t num_requests = 0;  // number of segments requested and not yet received, in a pull
  bool is_final_sent = false;

 private:
  void add_bytes(std::size_t first_copy);

  AcceptedTransfer what_;
  PieceCursor cursor_;
  std::uint64_t bytes_left_ = 0;                          // number of bytes not assigned to lanes
  std::unordered_map<std::size_t, PieceCursor> carries_;  // where the rest of a lane's range begins; key: lane
  std::unordered_map<std::size_t, RangeDigest> digests_;  // hash of the range that a lane receives; key: lane
};

}  // namespace kvferry::tcp
