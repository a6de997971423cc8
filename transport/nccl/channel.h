// One communicator with its stream: pieces go through it one after another, in one direction. Private to this folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/base/clock.h"
#include "transport/base/device.h"
#include "transport/nccl/communicators.h"
#include "transport/nccl/messages.h"

namespace kvferry::nccl {

/// Device buffers in which small ranges are gathered, one for each channel. They are kept until the transport ends,
/// because releasing device memory waits for all work of the device. Used by the progress thread only.
class StagingPool {
 public:
  explicit StagingPool(Device& device) : device_(device) {}
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;
  ~StagingPool() {
    for (std::byte* const buffer : free_) device_.release(MemoryKind::kDevice, buffer);
  }

  /// Returns a buffer of kPieceBytesMax bytes. A new one is allocated on another thread, because allocating may wait
  /// for the device's work, and this work may wait for a communicator that the progress thread has to advance.
  std::future<Result<std::byte*>> take() {
    if (free_.empty())
      return std::async(std::launch::async, [this] { return device_.allocate(MemoryKind::kDevice, kPieceBytesMax); });
    std::promise<Result<std::byte*>> ready;
    ready.set_value(free_.back());
    free_.pop_back();
    return ready.get_future();
  }
  void give_back(std::byte* buffer) { free_.push_back(buffer); }

 private:
  Device& device_;
  std::vector<std::byte*> free_;
};

enum class Role { kSender, kReceiver };

/// A piece as the sender or the receiver sees it. Both have the same number of parts, of the same sizes.
struct PieceTransfer {
  std::uint64_t token = 0;
  std::vector<std::span<std::byte>> parts;
  std::uint64_t packed_bytes_max = 0;  // parts of up to this size are sent together, through the staging buffer
  bool is_drained = false;             // true: the receiver drops the bytes, and needs only the sizes of `parts`
};

/// Used by the progress thread only. No method blocks. Only advance() starts posted pieces and reports their ends.
class Channel {
 public:
  struct Report {
    bool is_started = false;  // true: the communicator has taken a sender's piece; false: the piece has ended
    std::uint64_t token = 0;
    // Outcome of an ended piece, which no longer touches memory. A piece may fail before it starts.
    Result<void> outcome;
  };

  static Result<std::unique_ptr<Channel>> open(Device& device, StagingPool& staging, Communicators& communicators,
                                               const std::string& id, int rank, Role role);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  void post(PieceTransfer piece) { queue_.push_back(std::move(piece)); }
  /// Removes a piece that has not begun; no report about it follows. Returns false if the piece is unknown or has
  /// begun.
  bool withdraw(std::uint64_t token);
  /// Starts queued pieces and ends finished ones, as far as that needs no waiting. Appends to `reports`.
  void advance(TimeNs now, std::vector<Report>& reports);

  /// Returns true if the communicator or the device has failed; the caller must then call abort().
  bool is_failed() const { return !why_.empty(); }
  const std::string& why() const { return why_; }
  /// Returns true if advance() must be called again to notice that work under way has ended.
  bool is_busy() const { return is_aborting_ ? !is_quiet_ : !is_set_up_ || is_posting_ || !in_flight_.empty(); }
  /// Returns when the channel last made progress, or began to work after it was idle; 0 if no work is under way.
  TimeNs progressed_at() const { return is_busy() ? progressed_at_ : 0; }

  /// Drops queued pieces and aborts pieces that are under way. No reports about them follow.
  void abort();
  /// Returns true if, after abort(), neither the communicator nor the stream touches memory any more.
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

  /// Returns whether the staging buffer is allocated by now.
  bool has_staging();
  /// Starts a piece. Returns false, and reports the piece as ended, if the device refuses to copy its parts to the
  /// staging buffer.
  bool begin(PieceTransfer& piece, std::vector<Report>& reports);
  /// Moves the queue's first piece to in_flight_. Precondition: the communicator has posted the piece's NCCL group.
  void end_posting();
  void reap(TimeNs now, std::vector<Report>& reports);
  /// After abort(): finds out whether the channel is quiet, which is assumed if the device's events keep failing.
  void settle(TimeNs now);
  void fail(const Error& error) {
    if (why_.empty()) why_ = error.what.empty() ? "NCCL or the GPU gave no reason" : error.what;
  }

  Device& device_;
  StagingPool& pool_;
  const Role role_;
  DeviceStream stream_ = nullptr;
  std::future<Result<std::byte*>> allocation_;  // pending allocation of the staging buffer
  std::byte* staging_ = nullptr;
  std::unique_ptr<Communicator> communicator_;
  std::deque<PieceTransfer> queue_;
  std::vector<DeviceCopy> copies_;  // copies between the staging buffer and the parts of the queue's first piece
  std::deque<InFlight> in_flight_;
  bool is_set_up_ = false;
  bool is_posting_ = false;  // the communicator has not finished posting the queue's first piece
  bool is_aborting_ = false;
  bool is_quiet_ = false;
  std::unique_ptr<DeviceEvent> last_;  // event recorded after the abort; marks the end of the stream's work
  TimeNs settle_until_ = 0;            // after the abort: when the device counts as dead; 0: its events do not fail
  TimeNs progressed_at_ = 0;
  std::string why_;
};

}  // namespace kvferry::nccl
