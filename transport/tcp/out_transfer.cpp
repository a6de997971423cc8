#include "transport/tcp/out_transfer.h"

#include <algorithm>
#include <utility>

#include "transport/tcp/frames.h"

namespace kvferry::tcp {

OutTransfer::OutTransfer(AcceptedTransfer accepted) : what_(std::move(accepted)) { note_empty_ranges(0); }

void OutTransfer::feed(FedCopies more) {
  const std::size_t before = what_.copies.size();
  what_.copies.insert(what_.copies.end(), more.copies.begin(), more.copies.end());
  what_.checksums.insert(what_.checksums.end(), more.checksums.begin(), more.checksums.end());
  what_.is_complete = more.is_last;
  note_empty_ranges(before);
}

void OutTransfer::note_empty_ranges(std::size_t from) {
  for (std::size_t copy = from; copy < what_.copies.size(); ++copy) {
    bytes_left_ += what_.copies[copy].bytes;
    // No byte of it will ever come, so it is checked here.
    if (has_checksums() && what_.copies[copy].bytes == 0 && what_.checksums[copy] != chunk_checksum({}))
      corrupt.push_back(static_cast<std::uint32_t>(copy));
  }
  while (next_copy_ < what_.copies.size() && what_.copies[next_copy_].bytes == 0) ++next_copy_;
}

bool OutTransfer::take(std::size_t lane, std::uint64_t bytes_max, Segment& segment) {
  if (const auto found = carries_.find(lane); found != carries_.end()) {
    Carry& carry = found->second;
    const std::uint64_t left = what_.copies[carry.copy].bytes - carry.at;
    segment = {carry.copy, carry.at, std::min(left, bytes_max), 1};
    carry.at += segment.bytes;
    if (segment.bytes == left) carries_.erase(found);
    bytes_left_ -= segment.bytes;
    return true;
  }
  segment = {next_copy_, next_at_, 0, 0};
  while (next_copy_ < what_.copies.size() && segment.bytes < bytes_max && segment.num_pieces < kEntriesMax) {
    const std::uint64_t left = what_.copies[next_copy_].bytes - next_at_;
    const std::uint64_t bytes = std::min(left, bytes_max - segment.bytes);
    segment.bytes += bytes;
    segment.num_pieces += bytes > 0 ? 1 : 0;
    next_at_ += bytes;
    if (bytes < left) break;
    ++next_copy_;
    next_at_ = 0;
  }
  if (next_at_ > 0 && has_checksums()) {
    carries_[lane] = {next_copy_, next_at_};
    ++next_copy_;
    next_at_ = 0;
  }
  while (next_copy_ < what_.copies.size() && what_.copies[next_copy_].bytes == 0) ++next_copy_;
  bytes_left_ -= segment.bytes;
  return segment.bytes > 0;
}

void OutTransfer::check(std::size_t lane, std::size_t copy, std::span<const std::byte> bytes, bool ends) {
  const auto digest = checkers_[lane].add(bytes, ends);
  if (digest && *digest != what_.checksums[copy]) corrupt.push_back(static_cast<std::uint32_t>(copy));
}

}  // namespace kvferry::tcp
