#include "transport/gpu_ipc/device_transfer.h"

#include <algorithm>
#include <span>
#include <utility>

#include "transport/base/log.h"

namespace kvferry::gpu_ipc {
namespace {

constexpr TimeNs kSettleNs = kSecond;  // a device that refuses even its events for so long runs nothing any more

}  // namespace

void DeviceTransfer::feed(FedCopies more) {
  accepted_.copies.insert(accepted_.copies.end(), more.copies.begin(), more.copies.end());
  accepted_.checksums.insert(accepted_.checksums.end(), more.checksums.begin(), more.checksums.end());
  accepted_.is_complete = more.is_last;
}

std::uint64_t DeviceTransfer::post(std::byte* remote, std::uint64_t bytes_max) {
  std::vector<DeviceCopy> copies;
  std::uint64_t posted = 0;
  while (next_ < accepted_.copies.size() && posted < bytes_max) {
    const CopyRange& range = accepted_.copies[next_];
    const std::uint64_t bytes = std::min(range.bytes - next_bytes_, bytes_max - posted);
    std::byte* const here = accepted_.local_base + range.local_offset + next_bytes_;
    std::byte* const there = remote + range.remote_offset + next_bytes_;
    const bool is_pull = accepted_.direction == Direction::kPull;
    if (bytes > 0) copies.push_back({is_pull ? here : there, is_pull ? there : here, bytes});
    posted += bytes;
    next_bytes_ += bytes;
    if (next_bytes_ == range.bytes) {
      ++next_;
      next_bytes_ = 0;
    }
  }
  if (!copies.empty()) {
    // One that was refused may have begun: there is an event after it all the same.
    if (Result<void> ok = device_.copy(copies, stream_); !ok) end(ErrorCode::kInternal, ok.error().what);
    fence(posted);
  }
  if (next_ == accepted_.copies.size() && wants_checksums()) start_checksums();
  return posted;
}

void DeviceTransfer::start_checksums() {
  // In the stream's order, so after the copies. A pull's bytes are hashed where they arrived, a push's at their source:
  // reading back what was just written there would prove no more.
  std::vector<std::span<const std::byte>> ranges;
  ranges.reserve(accepted_.copies.size());
  for (const CopyRange& range : accepted_.copies)
    ranges.emplace_back(accepted_.local_base + range.local_offset, range.bytes);
  Result<std::unique_ptr<Device::Checksums>> sums = device_.checksums(ranges, stream_);
  if (sums) {
    sums_ = std::move(*sums);
  } else {
    end(ErrorCode::kInternal, sums.error().what);
  }
  fence(0);
}

void DeviceTransfer::fence(std::uint64_t bytes) {
  unfenced_bytes_ += bytes;
  Result<DeviceEvent> end_of_piece = DeviceEvent::record(device_, stream_);
  lacks_fence_ = !end_of_piece;
  if (!end_of_piece) return end(ErrorCode::kInternal, end_of_piece.error().what);
  pieces_.push_back({std::move(*end_of_piece), std::exchange(unfenced_bytes_, 0)});
}

std::uint64_t DeviceTransfer::reap(TimeNs now) {
  if (is_quiet()) return 0;
  std::uint64_t bytes = 0;
  if (lacks_fence_) fence(0);
  if (lacks_fence_) settle(Error{ErrorCode::kInternal, what_}, now);
  while (!pieces_.empty()) {
    const Result<bool> is_reached = pieces_.front().end.is_reached();
    if (!is_reached) {
      settle(is_reached.error(), now);
      break;
    }
    refused_since_ = 0;
    if (!*is_reached) break;
    bytes += pieces_.front().bytes;
    pieces_.pop_front();
  }
  if (is_quiet()) bytes += std::exchange(unfenced_bytes_, 0);
  if (is_quiet() && sums_ != nullptr) check();
  return bytes;
}

void DeviceTransfer::settle(const Error& refusal, TimeNs now) {
  end(ErrorCode::kInternal, refusal.what);
  if (refused_since_ == 0) refused_since_ = now;
  if (now - refused_since_ < kSettleNs) return;
  log().error("gpu_ipc: {} fails: {}", device_.describe(), refusal.what);
  for (const Piece& piece : pieces_) unfenced_bytes_ += piece.bytes;
  pieces_.clear();
  lacks_fence_ = false;
  was_given_up_ = true;
}

void DeviceTransfer::check() {
  const std::unique_ptr<Device::Checksums> sums = std::move(sums_);
  are_checked_ = true;
  if (has_ended()) return;
  const Result<std::vector<std::uint64_t>> taken = sums->take();
  if (!taken) return end(ErrorCode::kInternal, taken.error().what);
  for (std::uint32_t range = 0; range < accepted_.checksums.size(); ++range) {
    if ((*taken)[range] != accepted_.checksums[range]) corrupt_ranges_.push_back(range);
  }
  if (!corrupt_ranges_.empty())
    end(ErrorCode::kCorrupt,
        fmt::format("{} of {} ranges differ from their checksums", corrupt_ranges_.size(), accepted_.checksums.size()));
}

void DeviceTransfer::end(ErrorCode code, std::string what) {
  if (has_ended()) return;
  code_ = code;
  what_ = std::move(what);
}

}  // namespace kvferry::gpu_ipc
