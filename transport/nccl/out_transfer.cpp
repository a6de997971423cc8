#include "transport/nccl/out_transfer.h"

#include <algorithm>

namespace kvferry::nccl {

OutTransfer::OutTransfer(AcceptedTransfer accepted) : what_(std::move(accepted)) {
  FedCopies first{what_.id, what_.peer, std::exchange(what_.copies, {}), std::exchange(what_.checksums, {}),
                  what_.is_complete};
  feed(first);
}

void OutTransfer::feed(const FedCopies& more) {
  const std::size_t first = what_.copies.size();
  what_.append(more);
  for (std::size_t index = first; index < what_.copies.size(); ++index) {
    missing_bytes_ += what_.copies[index].bytes;
    if (what_.has_checksums() && what_.copies[index].bytes == 0) verifier_.compare_local(index);
  }
  cursor_.skip_empty_copies(what_.copies);
}

void OutTransfer::end(ErrorCode code, std::string what) {
  if (is_ended()) return;
  code_ = code;
  why_ = std::move(what);
}

std::vector<Part> OutTransfer::take_piece(std::uint64_t bytes_max) {
  std::vector<Part> parts;
  while (!cursor_.is_at_end(what_.copies) && parts.size() < kExtentsMax && bytes_max > 0) {
    const Piece piece = cursor_.take(what_.copies, bytes_max);
    const CopyRange& copy = what_.copies[piece.copy];
    parts.push_back(
        {piece.copy, what_.local_base + copy.local_offset + piece.at, copy.remote_offset + piece.at, piece.bytes});
    bytes_max -= piece.bytes;
    cursor_.skip_empty_copies(what_.copies);
  }
  return parts;
}

void OutTransfer::arrived(std::span<const Part> parts) {
  for (const Part& part : parts) {
    missing_bytes_ -= part.bytes;
    if (what_.has_checksums() && verifier_.has_arrived(part.copy, part.bytes)) to_hash_.push_back(part.copy);
  }
}

std::vector<Part> OutTransfer::take_hashable() {
  std::vector<Part> copies;
  while (!to_hash_.empty() && copies.size() < kExtentsMax) {
    const std::size_t index = to_hash_.back();
    to_hash_.pop_back();
    const CopyRange& copy = what_.copies[index];
    copies.push_back({index, what_.local_base + copy.local_offset, copy.remote_offset, copy.bytes});
  }
  num_hashing_ += copies.size();
  return copies;
}

void OutTransfer::hashed(std::span<const Part> copies, std::span<const std::uint64_t> checksums) {
  num_hashing_ -= copies.size();
  for (std::size_t index = 0; index < copies.size(); ++index) verifier_.compare(copies[index].copy, checksums[index]);
}

bool OutTransfer::is_all_here() const {
  return what_.is_complete && missing_bytes_ == 0 && to_hash_.empty() && num_hashing_ == 0;
}

bool OutTransfer::is_delivered() const { return !is_ended() && is_all_here() && !verifier_.has_corrupt(); }

void OutTransfer::end_if_corrupt() {
  if (!is_ended() && verifier_.has_corrupt() && is_all_here()) end(ErrorCode::kCorrupt, verifier_.what());
}

}  // namespace kvferry::nccl
