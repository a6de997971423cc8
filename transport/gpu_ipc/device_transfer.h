// The copies of one transfer, enqueued in the backend's streams on the device. Private to this folder.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "transport/base/clock.h"
#include "transport/base/device.h"
#include "transport/piece_cursor.h"
#include "transport/range_verifier.h"
#include "transport/transfer_table.h"

namespace kvferry::gpu_ipc {

/// Launches take turns in these streams, so that one begins while the last copies of the one before are under way.
using Streams = std::array<DeviceStream, 2>;

/// The copies of one transfer, and the checksums after them. Used by the progress thread only.
class DeviceTransfer {
 public:
  DeviceTransfer(AcceptedTransfer accepted, Device& device, const Streams& streams)
      : accepted_(std::move(accepted)), device_(device), streams_(streams) {}

  const AcceptedTransfer& accepted() const { return accepted_; }
  void feed(const FedCopies& more) { accepted_.append(more); }

  /// Returns true if copies or checksums are left that are not enqueued on the device.
  bool has_more() const {
    return !cursor_.is_at_end(accepted_.copies) || (needs_checksums() && !verifier_.is_hashing());
  }
  /// Enqueues up to `bytes_max` bytes of copies in one launch and, after the transfer's last copy, the checksums.
  /// `remote`: where the peer's region is mapped. `copies`: memory for the launch's copies, which keeps its room for
  /// later launches. Returns the number of bytes in the launch.
  std::uint64_t post(std::byte* remote, std::uint64_t bytes_max, std::vector<DeviceCopy>& copies);
  /// Polls the device. Returns the number of posted bytes whose copies have ended, or were given up, since the last
  /// call.
  std::uint64_t reap(TimeNs now);

  /// Ends the transfer: no more work is enqueued for it. Only the first call's code and reason are kept.
  void end(ErrorCode code, std::string what);
  bool has_ended() const { return code_ != ErrorCode::kOk; }
  /// Returns true if the device no longer accesses memory for this transfer.
  bool is_quiet() const { return launches_.empty() && !lacks_fence_; }
  /// Returns true if is_quiet() is only assumed, because the device's events failed for too long.
  bool was_given_up() const { return was_given_up_; }
  /// Returns true if every byte is copied and, if there are checksums, verified.
  bool is_through() const {
    return !has_ended() && is_quiet() && accepted_.is_complete && cursor_.is_at_end(accepted_.copies) &&
           !needs_checksums();
  }

  ErrorCode code() const { return code_; }
  const std::string& what() const { return what_; }
  std::vector<std::uint32_t> corrupt_ranges() const { return verifier_.corrupt_ranges(); }

 private:
  /// Copies or checksums that were enqueued together, and the event that follows them.
  struct Launch {
    DeviceEvent end;
    std::uint64_t bytes = 0;
  };
  bool needs_checksums() const {
    return accepted_.is_complete && accepted_.has_checksums() && !is_verified_ && !has_ended();
  }
  /// Puts up to `bytes_max` bytes of the copies that are not enqueued yet into `copies`, and returns their number.
  std::uint64_t take_piece(std::byte* remote, std::uint64_t bytes_max, std::vector<DeviceCopy>& copies);
  void start_checksums();
  void finish_checksums();
  DeviceStream stream() const { return streams_[turn_]; }
  /// Records an event after the work enqueued so far in stream(). `bytes`: number of bytes enqueued since the last
  /// call.
  void fence(std::uint64_t bytes);
  /// Ends the transfer because an event of the device has failed. If events have failed for too long, the transfer
  /// counts as quiet, and was_given_up() returns true.
  void settle(const Error& refusal, TimeNs now);

  AcceptedTransfer accepted_;
  Device& device_;
  const Streams streams_;
  RangeVerifier verifier_{accepted_};
  PieceCursor cursor_;
  std::deque<Launch> launches_;
  std::size_t turn_ = 0;  // the stream of the last launch
  std::uint64_t unfenced_bytes_ = 0;
  bool lacks_fence_ = false;  // whether recording the last event failed
  TimeNs refused_since_ = 0;  // time since which the device's events fail; 0: they do not fail
  bool was_given_up_ = false;
  bool is_verified_ = false;
  ErrorCode code_ = ErrorCode::kOk;
  std::string what_;
};

}  // namespace kvferry::gpu_ipc
