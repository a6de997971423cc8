// Interface to a GPU: memory, streams, events, and copies in a stream's order. It needs no header of the GPU's vendor.
//
// Work enqueued on a stream runs later, in the stream's order, concurrently with other streams. Only events order the
// work of different streams, or of a stream and a network card.
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

/// A queue of work: CUDA's cudaStream_t. nullptr: the default stream.
using DeviceStream = void*;

enum class MemoryKind : std::uint8_t {
  kDevice,  // GPU memory, which the host can access only if is_host()
  kPinned,  // host memory that the GPU and its copy engines access directly
};

/// A copy of `bytes` bytes; `to` and `from` may each be device memory or pinned memory.
struct DeviceCopy {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::uint64_t bytes = 0;
};

/// One GPU. Threads: any. Errors of each function that returns a Result: kUnavailable with the device's reason, kFull
/// if memory is exhausted, and those that the function's own comment names.
class Device {
 public:
  virtual ~Device() = default;
  /// Returns a name for logs, such as "NVIDIA H200 (cuda:0)".
  virtual std::string describe() const = 0;
  /// Returns the device's number on the PCI bus, such as "0000:1b:00.0"; empty: the device is not on a PCI bus.
  virtual std::string pci_bus_id() const { return ""; }
  /// Returns an id of the device that is the same in processes that number their devices differently, such as
  /// "GPU-8932f937-..." or "MIG-..." for a part of a GPU; empty: the device has none.
  virtual std::string uuid() const { return ""; }
  /// Returns true if the host can access the device's memory, which only a simulated GPU allows.
  virtual bool is_host() const { return false; }
  /// Makes this the calling thread's GPU for good. Only for threads that kvferry has started. The other functions
  /// restore the GPU that the thread had before, unless the process has no context on that GPU: restoring it would make
  /// a context, which takes some 500 MiB.
  virtual Result<void> bind_thread() { return {}; }

  virtual Result<std::byte*> allocate(MemoryKind kind, std::uint64_t bytes) = 0;
  /// Frees memory that allocate() returned. Blocks until the device's work has ended.
  virtual void release(MemoryKind kind, std::byte* base) = 0;
  /// Returns how many bytes of device memory are free.
  virtual Result<std::uint64_t> free_bytes() {
    return Error{ErrorCode::kUnavailable, "the device does not report how much of its memory is free: " + describe()};
  }
  /// Page-locks existing host memory, so that the GPU can access it. Calls for the same memory are counted, because a
  /// chunk store and a transport may both pin one pool. Other memory that overlaps pinned memory is refused. Memory
  /// that another library of the process has page-locked counts as pinned, and stays so until that library unlocks it.
  virtual Result<void> pin(std::span<std::byte> memory) = 0;
  virtual void unpin(std::span<std::byte> memory) = 0;

  /// Makes a stream that does not synchronise with the default stream.
  virtual Result<DeviceStream> make_stream() = 0;
  /// Destroys the stream; work that is enqueued on it still runs.
  virtual void drop_stream(DeviceStream stream) = 0;

  using EventHandle = void*;
  /// Makes an event that is reached when all work enqueued on the stream so far has ended.
  virtual Result<EventHandle> record(DeviceStream stream) = 0;
  virtual void drop_event(EventHandle event) = 0;
  /// Returns true if all work before the event has ended.
  virtual Result<bool> is_reached(EventHandle event) = 0;
  /// Blocks the host until the event is reached.
  virtual Result<void> wait(EventHandle event) = 0;
  /// Makes work that is enqueued on the stream from now on wait until the event is reached.
  virtual Result<void> wait_on(DeviceStream stream, EventHandle event) = 0;

  /// Enqueues the copies, which may run concurrently and must not overlap. `copies` is read before the call returns.
  virtual Result<void> copy(std::span<const DeviceCopy> copies, DeviceStream stream) = 0;

  /// Returns a handle with which other processes of this host can open this device memory.
  virtual Result<std::string> export_memory(std::span<const std::byte> memory);
  /// Maps `bytes` bytes that a process exported. If this process exported them, returns their original address. The
  /// handle is checked, because it comes from a peer and an access outside an allocation would end the process. Each
  /// open_memory() needs a close_memory(), after the device's last access. kCorrupt: the handle is invalid, or covers
  /// fewer bytes.
  virtual Result<std::byte*> open_memory(const std::string& exported, std::uint64_t bytes);
  virtual void close_memory(std::byte*) {}

  /// A pending computation of chunk_checksum() for several ranges, in the order of a stream. Owns the memory to which
  /// the device writes its results.
  class Checksums {
   public:
    virtual ~Checksums() = default;
    virtual Result<bool> is_done() = 0;
    /// Waits until the device is done. Returns one checksum for each range.
    virtual Result<std::vector<std::uint64_t>> take() = 0;
  };
  virtual Result<std::unique_ptr<Checksums>> checksums(std::span<const std::span<const std::byte>> ranges,
                                                       DeviceStream stream) = 0;
};

inline Result<std::string> Device::export_memory(std::span<const std::byte>) {
  return Error{ErrorCode::kUnavailable, "the device can't export memory to other processes: " + describe()};
}
inline Result<std::byte*> Device::open_memory(const std::string&, std::uint64_t) {
  return Error{ErrorCode::kUnavailable, "the device can't open memory of other processes: " + describe()};
}

/// Keeps host memory pinned during its lifetime. An empty object pins nothing.
class DevicePin {
 public:
  DevicePin() = default;
  static Result<DevicePin> make(Device& device, std::span<std::byte> memory) {
    KVFERRY_TRY(device.pin(memory));
    return DevicePin(device, memory);
  }
  DevicePin(DevicePin&& other) noexcept : device_(std::exchange(other.device_, nullptr)), memory_(other.memory_) {}
  DevicePin& operator=(DevicePin&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(memory_, other.memory_);
    return *this;
  }
  ~DevicePin() {
    if (device_ != nullptr) device_->unpin(memory_);
  }

 private:
  DevicePin(Device& device, std::span<std::byte> memory) : device_(&device), memory_(memory) {}
  Device* device_ = nullptr;
  std::span<std::byte> memory_;
};

/// Owns one event of a device. An empty object counts as a reached event.
class DeviceEvent {
 public:
  DeviceEvent() = default;
  static Result<DeviceEvent> record(Device& device, DeviceStream stream) {
    const Device::EventHandle made = KVFERRY_TRY(device.record(stream));
    return DeviceEvent(device, made);
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
