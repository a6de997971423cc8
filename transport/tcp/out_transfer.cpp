#include "transport/tcp/out_transfer.h"

#include <algorithm>
#include <utility>

#include "transport/tcp/messages.h"

namespace kvferry::tcp {

OutTransfer::OutTransfer(AcceptedTransfer accepted) : what_(std::move(accepted)) { add_bytes(0); }

void OutTransfer::feed(const FedCopies& more) {
  const std::size_t first = what_.copies.size();
  what_.append(more);
  add_bytes(first);
}

void OutTransfer::add_bytes(std::size_t first_copy) {
  for (std::size_t copy = first_copy; copy < what_.copies.size(); ++copy) {
    bytes_left_ += what_.copies[copy].bytes;
    // No message will carry an empty range, so it is compared here.
    if (has_checksums() && what_.copies[copy].bytes == 0) verifier.compare_local(copy);
  }
  cursor_.skip_empty_copies(what_.copies);
}

bool OutTransfer::take(std::size_t lane, std::uint64_t bytes_max, Segment& segment) {
  if (const auto found = carries_.find(lane); found != carries_.end()) {
    const Piece piece = found->second.take(what_.copies, bytes_max);
    segment = {piece.copy, piece.at, piece.bytes, 1};
    if (piece.ends_copy) carries_.erase(found);
    bytes_left_ -= segment.bytes;
    return true;
  }
  segment = {cursor_.copy(), cursor_.at(), 0, 0};
  while (!cursor_.is_at_end(what_.copies) && segment.bytes < bytes_max && segment.num_pieces < kEntriesMax) {
    const Piece piece = cursor_.take(what_.copies, bytes_max - segment.bytes);
    segment.bytes += piece.bytes;
    segment.num_pieces += piece.bytes > 0 ? 1 : 0;
  }
  if (cursor_.is_inside_copy() && has_checksums()) {
    carries_[lane] = cursor_;
    cursor_.skip_copy();
  }
  cursor_.skip_empty_copies(what_.copies);
  bytes_left_ -= segment.bytes;
  return segment.bytes > 0;
}

void OutTransfer::check(std::size_t lane, std::size_t copy, std::span<const std::byte> bytes, bool ends_copy) {
  if (const auto digest = digests_[lane].add(bytes, ends_copy)) verifier.compare(copy, *digest);
}

}  // namespace kvferry::tcp
