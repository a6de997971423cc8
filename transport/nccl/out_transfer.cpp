#include "transport/nccl/out_transfer.h"

#include <algorithm>

#include "transport/base/checksum.h"

namespace kvferry::nccl {

OutTransfer::OutTransfer(AcceptedTransfer accepted) : what_(std::move(accepted)) {
  std::vector<CopyRange> copies = std::exchange(what_.copies, {});
  std::vector<std::uint64_t> checksums = std::exchange(what_.checksums, {});
  feed({std::move(copies), std::move(checksums), what_.is_complete});
}

void OutTransfer::feed(FedCopies more) {
  const std::size_t first = what_.copies.size();
  what_.copies.insert(what_.copies.end(), more.copies.begin(), more.copies.end());
  what_.checksums.insert(what_.checksums.end(), more.checksums.begin(), more.checksums.end());
  what_.is_complete = more.is_last;
  for (std::size_t index = first; index < what_.copies.size(); ++index) {
    const std::uint64_t bytes = what_.copies[index].bytes;
    missing_bytes_ += bytes;
    if (!has_checksums()) continue;
    missing_of_copy_.push_back(bytes);
    if (bytes == 0 && what_.checksums[index] != chunk_checksum({}))
      corrupt_.push_back(static_cast<std::uint32_t>(index));
  }
  skip_empty_copies();
}

void OutTransfer::end(ErrorCode code, std::string what) {
  if (is_ended()) return;
  code_ = code;
  why_ = std::move(what);
}

void OutTransfer::skip_empty_copies() {
  while (next_copy_ < what_.copies.size() && what_.copies[next_copy_].bytes == 0) ++next_copy_;
}

std::vector<Part> OutTransfer::take_piece(std::uint64_t bytes_max) {
  std::vector<Part> parts;
  std::uint64_t left = bytes_max;
  while (next_copy_ < what_.copies.size() && parts.size() < kExtentsMax && left > 0) {
    const CopyRange& copy = what_.copies[next_copy_];
    const std::uint64_t bytes = std::min(left, copy.bytes - next_at_);
    parts.push_back(
        {next_copy_, what_.local_base + copy.local_offset + next_at_, copy.remote_offset + next_at_, bytes});
    left -= bytes;
    next_at_ += bytes;
    if (next_at_ < copy.bytes) continue;
    next_at_ = 0;
    ++next_copy_;
    skip_empty_copies();
  }
  return parts;
}

void OutTransfer::arrived(std::span<const Part> parts) {
  for (const Part& part : parts) {
    missing_bytes_ -= part.bytes;
    if (has_checksums() && (missing_of_copy_[part.copy] -= part.bytes) == 0) to_hash_.push_back(part.copy);
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
  for (std::size_t index = 0; index < copies.size(); ++index) {
    if (checksums[index] != what_.checksums[copies[index].copy])
      corrupt_.push_back(static_cast<std::uint32_t>(copies[index].copy));
  }
}

bool OutTransfer::is_all_here() const {
  return what_.is_complete && missing_bytes_ == 0 && to_hash_.empty() && num_hashing_ == 0;
}

bool OutTransfer::is_delivered() const { return !is_ended() && is_all_here() && corrupt_.empty(); }

void OutTransfer::end_if_corrupt() {
  if (is_ended() || corrupt_.empty() || !is_all_here()) return;
  std::sort(corrupt_.begin(), corrupt_.end());
  end(ErrorCode::kCorrupt,
      fmt::format("{} of {} ranges differ from their checksums", corrupt_.size(), what_.copies.size()));
}

}  // namespace kvferry::nccl
