// Owners of CUDA's memory and events.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/cuda/cuda_result.h"

namespace kvferry {

/// Owns device memory.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() { cudaFree(data_); }
  Result<void> upload(const void* from, std::size_t bytes) {
    if (Result<void> ok = cuda_result(cudaMalloc(&data_, bytes), "allocating GPU memory"); !ok) return ok;
    return cuda_result(cudaMemcpy(data_, from, bytes, cudaMemcpyHostToDevice), "copying to the GPU");
  }
  const std::byte* data() const { return static_cast<const std::byte*>(data_); }

 private:
  void* data_ = nullptr;
};

/// Owns device memory of a stream's pool, which is freed in the order of the stream, without waiting.
class StreamBuffer {
 public:
  StreamBuffer() = default;
  StreamBuffer(const StreamBuffer&) = delete;
  StreamBuffer& operator=(const StreamBuffer&) = delete;
  ~StreamBuffer() {
    if (data_ != nullptr) cudaFreeAsync(data_, stream_);
  }
  Result<void> allocate(std::size_t bytes, cudaStream_t stream) {
    stream_ = stream;
    return cuda_result(cudaMallocAsync(&data_, bytes, stream), "allocating GPU memory");
  }
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

/// Owns pinned host memory, which the device copies from and to directly.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  PinnedBuffer(PinnedBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~PinnedBuffer() { cudaFreeHost(data_); }
  Result<void> allocate(std::size_t bytes) {
    bytes_ = bytes;
    return cuda_result(cudaMallocHost(&data_, bytes), "allocating pinned host memory");
  }
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::size_t size() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Reuses pinned buffers, since allocating one takes longer than a transfer. Threads: any.
class PinnedPool {
 public:
  Result<PinnedBuffer> take(std::size_t bytes) {
    {
      const std::lock_guard lock(mutex_);
      const auto fits =
          std::find_if(free_.begin(), free_.end(), [&](const auto& buffer) { return buffer.size() >= bytes; });
      if (fits != free_.end()) {
        PinnedBuffer taken = std::move(*fits);
        free_.erase(fits);
        return taken;
      }
    }
    PinnedBuffer made;
    if (Result<void> ok = made.allocate(std::bit_ceil(std::max(bytes, kSmallest))); !ok) return std::move(ok).error();
    return made;
  }
  void give_back(PinnedBuffer buffer) {
    const std::lock_guard lock(mutex_);
    if (buffer.data() != nullptr && free_.size() < kKept) free_.push_back(std::move(buffer));
  }

 private:
  static constexpr std::size_t kSmallest = 64 << 10, kKept = 16;
  std::mutex mutex_;
  std::vector<PinnedBuffer> free_;
};

class Event {
 public:
  Event() = default;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }
  Result<void> create() {
    return cuda_result(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "creating an event");
  }
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace kvferry
