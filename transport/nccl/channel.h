// One communicator with its stream: pieces go through it one after the other, in one direction. Private to this folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/base/clock.h"
#include "transport/base/device.h"
#include "transport/nccl/communicators.h"
#include "transport/nccl/staging.h"

namespace kvferry::nccl {

enum class Role { kSender, kReceiver };

/// What one side of a channel does for a piece. Both sides have as many parts, of the same sizes.
struct PieceTransfer {
  std::uint64_t token = 0;
  std::vector<std::span<std::byte>> parts;
  std::uint64_t packed_bytes_max = 0;  // parts of up to this many go through the staging buffer, as one
  bool is_drained = false;             // of a receiver: nobody wants the bytes any more; parts only say how many
};

/// Progress thread only. Never blocks; everything happens in advance().
class Channel {
 public:
  struct Report {
    bool is_started = false;  // a sender's bytes come next in the communicator; else it is over, its memory quiet
    std::uint64_t token = 0;
    Result<void> outcome;  // of what is over; one that failed before it started never starts
  };

  static Result<std::unique_ptr<Channel>> open(Device& device, StagingPool& staging, Communicators& communicators,
                                               const std::string& id, int rank, Role role);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  void post(PieceTransfer flight) { queue_.push_back(std::move(flight)); }
  /// True: it had not begun and never will; no report follows.
  bool withdraw(std::uint64_t token);
  /// Does what can be done now. `reports` are added to.
  void advance(TimeNs now, std::vector<Report>& reports);

  /// The communicator or the device has failed; abort() is all that is left.
  bool is_failed() const { return !why_.empty(); }
  const std::string& why() const { return why_; }
  /// Something of it may end without any other sign than advance() seeing it.
  bool is_busy() const { return is_aborting_ ? !is_quiet_ : !is_set_up_ || is_posting_ || !in_flight_.empty(); }
  /// Last set up, begun or reached; 0: nothing is owed.
  TimeNs progressed_at() const { return is_busy() ? progressed_at_ : 0; }

  /// Drops what is queued. No reports follow.
  void abort();
  /// After abort(): neither the communicator nor the stream touches any memory.
  bool is_quiet() const { return is_quiet_; }

  Device& device() const { return device_; }
  DeviceStream stream() const { return stream_; }

 private:
  struct InFlight {
    std::uint64_t token = 0;
    Result<void> outcome;
    DeviceEvent end;
  };
  Channel(Device& device, StagingPool& pool, Role role) : device_(device), pool_(pool), role_(role) {}

  /// Whether there is a staging buffer by now.
  bool has_staging();
  /// False: it was refused, and a report says so.
  bool begin(PieceTransfer& flight, std::vector<Report>& reports);
  /// The group of the first in the queue is in the stream.
  void end_posting();
  void reap(TimeNs now, std::vector<Report>& reports);
  void settle(TimeNs now);
  void fail(const Error& error) {
    if (why_.empty()) why_ = error.what.empty() ? "it failed" : error.what;
  }

  Device& device_;
  StagingPool& pool_;
  const Role role_;
  DeviceStream stream_ = nullptr;
  std::future<Result<std::byte*>> allocation_;  // of the next one
  std::byte* staging_ = nullptr;
  std::unique_ptr<Communicator> communicator_;
  std::deque<PieceTransfer> queue_;
  std::vector<DeviceCopy> copies_;  // to or from the staging buffer, of the first in the queue
  std::deque<InFlight> in_flight_;
  bool is_set_up_ = false;
  bool is_posting_ = false;  // the first in the queue was given to the communicator, which is not through with it
  bool is_aborting_ = false;
  bool is_quiet_ = false;
  std::unique_ptr<DeviceEvent> last_;  // the end of the stream's work after the abort
  TimeNs settle_until_ = 0;
  TimeNs progressed_at_ = 0;
  std::string why_;
};

}  // namespace kvferry::nccl
