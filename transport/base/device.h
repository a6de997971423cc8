// A GPU as the rooms see it: memory, streams, events, and copies in a stream's order, without a header of its maker.
//
// Work given to a stream runs later, in the stream's order, beside other streams' work. What orders work of different
// streams, or of a stream and of a network card, is an event and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/base/result.h"

namespace kvferry {

/// A queue of work: CUDA's cudaStream_t. nullptr: the default stream, that of an engine that says nothing.
using DeviceStream = void*;

enum class MemoryKind : std::uint8_t {
  kDevice,  // the GPU's own: the host can't read it
  kPinned,  // the host's, which the GPU and its copy engines reach without a stop on the way
};

/// `bytes` bytes from `from` to `to`: of the device, or pinned.
struct DeviceCopy {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::uint64_t bytes = 0;
};

/// Threads: any. Errors of all: kUnavailable when the device refuses, with its reason; kFull: no memory is left.
class Device {
 public:
  virtual ~Device() = default;
  /// "NVIDIA H200 (cuda:0)".
  virtual std::string describe() const = 0;
  /// Its memory is the host's as well: a simulated GPU.
  virtual bool is_host() const { return false; }

  virtual Result<std::byte*> allocate(MemoryKind kind, std::uint64_t bytes) = 0;
  /// What allocate() gave. Waits for the device's work.
  virtual void release(MemoryKind kind, std::byte* base) = 0;
  /// Makes host memory that exists already pinned memory, until it was unpinned as often as pinned: a pool may be a
  /// store's and a transport's. Other memory that overlaps is refused.
  virtual Result<void> pin(std::span<std::byte> memory) = 0;
  virtual void unpin(std::span<std::byte> memory) = 0;

  /// A stream that does not wait for the default one.
  virtual Result<DeviceStream> make_stream() = 0;
  /// What it was given still runs.
  virtual void drop_stream(DeviceStream stream) = 0;

  using EventHandle = void*;
  /// Marks the end of what the stream was given so far.
  virtual Result<EventHandle> record(DeviceStream stream) = 0;
  virtual void drop_event(EventHandle event) = 0;
  /// Whether it was reached.
  virtual Result<bool> is_reached(EventHandle event) = 0;
  /// The host waits until it is.
  virtual Result<void> wait(EventHandle event) = 0;
  /// What the stream is given from now on starts after it.
  virtual Result<void> wait_on(DeviceStream stream, EventHandle event) = 0;

  /// All copies beside each other, in the stream's order. They must not overlap. `copies` is read before it returns.
  virtual Result<void> copy(std::span<const DeviceCopy> copies, DeviceStream stream) = 0;

  /// Opaque bytes with which other processes of this host can open this memory of the device.
  virtual Result<std::string> export_memory(std::span<const std::byte> memory);
  /// Where in this process the bytes lie that some process exported, `bytes` of them: what comes from a peer is not
  /// believed, since an access beyond an allocation is the end of a GPU's process. One's own are where they always
  /// were. As often as it was opened, close_memory() it again; the device must be through with it by then. kCorrupt:
  /// these are no such bytes, or not so many.
  virtual Result<std::byte*> open_memory(const std::string& exported, std::uint64_t bytes);
  virtual void close_memory(std::byte*) {}

  /// chunk_checksum() of each of them, taken in the stream's order. Owns what the device writes to.
  class Checksums {
   public:
    virtual ~Checksums() = default;
    virtual Result<bool> is_done() = 0;
    /// Waits. One for each range.
    virtual Result<std::vector<std::uint64_t>> take() = 0;
  };
  virtual Result<std::unique_ptr<Checksums>> checksums(std::span<const std::span<const std::byte>> ranges,
                                                       DeviceStream stream) = 0;
};

inline Result<std::string> Device::export_memory(std::span<const std::byte>) {
  return Error{ErrorCode::kUnavailable, describe() + " can't lend memory to other processes"};
}
inline Result<std::byte*> Device::open_memory(const std::string&, std::uint64_t) {
  return Error{ErrorCode::kUnavailable, describe() + " can't open memory of other processes"};
}

/// Owns one event of a device; empty: nothing to wait for.
class DeviceEvent {
 public:
  DeviceEvent() = default;
  static Result<DeviceEvent> record(Device& device, DeviceStream stream) {
    Result<Device::EventHandle> made = device.record(stream);
    if (!made) return std::move(made).error();
    return DeviceEvent(device, *made);
  }
  DeviceEvent(DeviceEvent&& other) noexcept : device_(other.device_), handle_(std::exchange(other.handle_, nullptr)) {}
  DeviceEvent& operator=(DeviceEvent&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~DeviceEvent() {
    if (handle_ != nullptr) device_->drop_event(handle_);
  }

  Result<bool> is_reached() const { return handle_ == nullptr ? Result<bool>(true) : device_->is_reached(handle_); }
  Result<void> wait() const { return handle_ == nullptr ? Result<void>() : device_->wait(handle_); }
  Result<void> make_wait(DeviceStream stream) const {
    return handle_ == nullptr ? Result<void>() : device_->wait_on(stream, handle_);
  }

 private:
  DeviceEvent(Device& device, Device::EventHandle handle) : device_(&device), handle_(handle) {}
  Device* device_ = nullptr;
  Device::EventHandle handle_ = nullptr;
};

}  // namespace kvferry
