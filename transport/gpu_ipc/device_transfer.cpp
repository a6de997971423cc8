#include "transport/gpu_ipc/device_transfer.h"

#include <algorithm>
#include <span>
#include <utility>

#include "transport/base/log.h"

namespace kvferry::gpu_ipc {
namespace {

constexpr TimeNs kSettleNs = kSecond;  // a device whose events fail for this long counts as dead

}  // namespace

std::uint64_t DeviceTransfer::post(std::byte* remote, std::uint64_t bytes_max, std::vector<DeviceCopy>& copies) {
  const std::uint64_t posted = take_piece(remote, bytes_max, copies);
  if (!copies.empty()) {
    turn_ = (turn_ + 1) % streams_.size();
    // Even if the call fails, some of its copies may run, so an event is recorded in any case.
    if (Result<void> ok = device_.copy(copies, stream()); !ok) end(ErrorCode::kInternal, ok.error().what);
    fence(posted);
  }
  if (cursor_.is_at_end(accepted_.copies) && needs_checksums()) start_checksums();
  return posted;
}

std::uint64_t DeviceTransfer::take_piece(std::byte* remote, std::uint64_t bytes_max, std::vector<DeviceCopy>& copies) {
  // The loop may run for every few KiB of a transfer. Local variables make it faster than members.
  const std::span<const CopyRange> ranges = accepted_.copies;
  std::byte* const local = accepted_.local_base;
  const bool is_pull = accepted_.is_pull();
  PieceCursor cursor = cursor_;
  std::uint64_t posted = 0;
  copies.clear();
  while (!cursor.is_at_end(ranges) && posted < bytes_max) {
    const Piece piece = cursor.take(ranges, bytes_max - posted);
    const CopyRange& range = ranges[piece.copy];
    std::byte* const here = local + range.local_offset + piece.at;
    std::byte* const there = remote + range.remote_offset + piece.at;
    if (piece.bytes > 0) copies.push_back({is_pull ? here : there, is_pull ? there : here, piece.bytes});
    posted += piece.bytes;
  }
  cursor_ = cursor;
  return posted;
}

void DeviceTransfer::start_checksums() {
  // The checksums are computed after the copies of both streams, and always of this process's memory: a pull's bytes
  // are hashed where they arrived, a push's bytes at their source.
  for (const Launch& launch : launches_) {
    if (Result<void> ok = launch.end.make_wait(stream()); !ok) return end(ErrorCode::kInternal, ok.error().what);
  }
  if (Result<void> ok = verifier_.start_on_device(device_, stream()); !ok) end(ErrorCode::kInternal, ok.error().what);
  fence(0);
}

void DeviceTransfer::fence(std::uint64_t bytes) {
  unfenced_bytes_ += bytes;
  Result<DeviceEvent> end_event = DeviceEvent::record(device_, stream());
  lacks_fence_ = !end_event;
  if (!end_event) return end(ErrorCode::kInternal, end_event.error().what);
  launches_.push_back({std::move(*end_event), std::exchange(unfenced_bytes_, 0)});
}

std::uint64_t DeviceTransfer::reap(TimeNs now) {
  if (is_quiet()) return 0;
  std::uint64_t bytes = 0;
  if (lacks_fence_) fence(0);
  if (lacks_fence_) settle(Error{ErrorCode::kInternal, what_}, now);
  while (!launches_.empty()) {
    const Result<bool> is_reached = launches_.front().end.is_reached();
    if (!is_reached) {
      settle(is_reached.error(), now);
      break;
    }
    refused_since_ = 0;
    if (!*is_reached) break;
    bytes += launches_.front().bytes;
    launches_.pop_front();
  }
  if (is_quiet()) bytes += std::exchange(unfenced_bytes_, 0);
  if (is_quiet() && verifier_.is_hashing()) finish_checksums();
  return bytes;
}

void DeviceTransfer::settle(const Error& refusal, TimeNs now) {
  end(ErrorCode::kInternal, refusal.what);
  if (refused_since_ == 0) refused_since_ = now;
  if (now - refused_since_ < kSettleNs) return;
  log().error(
      "gpu_ipc: {} is treated as dead and a transfer with it ends, because its CUDA events have failed for {} ms: {}",
      device_.describe(), kSettleNs / kMillisecond, refusal.what);
  for (const Launch& launch : launches_) unfenced_bytes_ += launch.bytes;
  launches_.clear();
  lacks_fence_ = false;
  was_given_up_ = true;
}

void DeviceTransfer::finish_checksums() {
  is_verified_ = true;
  if (has_ended()) return verifier_.drop_device();
  if (Result<void> ok = verifier_.compare_device(); !ok) return end(ErrorCode::kInternal, ok.error().what);
  if (verifier_.has_corrupt()) end(ErrorCode::kCorrupt, verifier_.what());
}

void DeviceTransfer::end(ErrorCode code, std::string what) {
  if (has_ended()) return;
  code_ = code;
  what_ = std::move(what);
}

}  // namespace kvferry::gpu_ipc
