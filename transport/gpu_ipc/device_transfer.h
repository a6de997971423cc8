// One transfer's copies in the transport's stream. Private to this folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "transport/base/clock.h"
#include "transport/base/device.h"
#include "transport/transfer_table.h"

namespace kvferry::gpu_ipc {

/// Progress thread only. Nothing here waits for the device.
class DeviceTransfer {
 public:
  DeviceTransfer(AcceptedTransfer accepted, Device& device, DeviceStream stream)
      : accepted_(std::move(accepted)), device_(device), stream_(stream) {}

  const AcceptedTransfer& accepted() const { return accepted_; }
  void feed(FedCopies more);

  /// Something is there that the device was not given.
  bool has_more() const { return next_ < accepted_.copies.size() || (wants_checksums() && sums_ == nullptr); }
  /// Gives it up to `bytes_max` bytes of copies, in one launch, and after the last of them the checksums. `remote`:
  /// where the peer's region lies. What was given, in bytes.
  std::uint64_t post(std::byte* remote, std::uint64_t bytes_max);
  /// Asks the device how far it is. Bytes that are through.
  std::uint64_t reap(TimeNs now);

  /// It goes no further; the first reason counts.
  void end(ErrorCode code, std::string what);
  bool has_ended() const { return code_ != ErrorCode::kOk; }
  /// The device touches no memory for it.
  bool is_quiet() const { return pieces_.empty() && !lacks_fence_; }
  /// Or so it is believed: the device stopped answering.
  bool was_given_up() const { return was_given_up_; }
  /// Every byte is where it belongs, and checked.
  bool is_through() const {
    return !has_ended() && is_quiet() && accepted_.is_complete && next_ == accepted_.copies.size() &&
           !wants_checksums();
  }

  ErrorCode code() const { return code_; }
  const std::string& what() const { return what_; }
  const std::vector<std::uint32_t>& corrupt_ranges() const { return corrupt_ranges_; }

 private:
  struct Piece {
    DeviceEvent end;
    std::uint64_t bytes = 0;
  };
  bool wants_checksums() const {
    return accepted_.is_complete && !accepted_.checksums.empty() && !are_checked_ && !has_ended();
  }
  void start_checksums();
  void check();
  /// Marks the end of what was given so far.
  void fence(std::uint64_t bytes);
  void settle(const Error& refusal, TimeNs now);

  AcceptedTransfer accepted_;
  Device& device_;
  const DeviceStream stream_;
  std::size_t next_ = 0;          // of the copies
  std::uint64_t next_bytes_ = 0;  // of that one, given already
  std::deque<Piece> pieces_;
  std::uint64_t unfenced_bytes_ = 0;
  bool lacks_fence_ = false;  // the device refused an event
  TimeNs refused_since_ = 0;  // the device says nothing but no; 0: it does not
  bool was_given_up_ = false;
  std::unique_ptr<Device::Checksums> sums_;
  bool are_checked_ = false;
  ErrorCode code_ = ErrorCode::kOk;
  std::string what_;
  std::vector<std::uint32_t> corrupt_ranges_;
};

}  // namespace kvferry::gpu_ipc
