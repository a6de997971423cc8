// Helpers for CUDA: error codes as Results, the current device, and owners of memory and events.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/base/result.h"

namespace kvferry {

/// Returns kFull if memory is exhausted, kUnavailable for any other error of CUDA.
inline Result<void> cuda_result(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return {};
  const ErrorCode error = code == cudaErrorMemoryAllocation ? ErrorCode::kFull : ErrorCode::kUnavailable;
  return Error{error, fmt::format("{}: {} ({})", what, cudaGetErrorString(code), cudaGetErrorName(code))};
}

/// Makes a device current during its lifetime, and restores the device that the thread had before.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal) {
    cudaGetDevice(&before_);
    if (before_ != ordinal) cudaSetDevice(ordinal);
    is_changed_ = before_ != ordinal;
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() {
    if (is_changed_) cudaSetDevice(before_);
  }

 private:
  int before_ = 0;
  bool is_changed_ = false;
};

/// Deleter for std::unique_ptr, which calls one of CUDA's functions.
template <auto free>
struct FreeBy {
  template <class Value>
  void operator()(Value* value) const {
    free(value);
  }
};

/// Pinned host memory, which the device copies from and to directly.
struct PinnedBuffer {
  std::unique_ptr<std::byte, FreeBy<cudaFreeHost>> memory;
  std::size_t bytes = 0;
  std::byte* data() const { return memory.get(); }
};

/// Reuses pinned buffers, since allocating one takes longer than a transfer. Threads: any.
class PinnedPool {
 public:
  Result<PinnedBuffer> take(std::size_t bytes) {
    {
      const std::lock_guard lock(mutex_);
      const auto fits =
          std::find_if(free_.begin(), free_.end(), [&](const auto& buffer) { return buffer.bytes >= bytes; });
      if (fits != free_.end()) {
        PinnedBuffer taken = std::move(*fits);
        free_.erase(fits);
        return taken;
      }
    }
    const std::size_t rounded = std::bit_ceil(std::max(bytes, kSmallest));
    void* made = nullptr;
    KVFERRY_TRY(cuda_result(cudaMallocHost(&made, rounded), "allocating pinned host memory"));
    PinnedBuffer buffer;
    buffer.memory.reset(static_cast<std::byte*>(made));
    buffer.bytes = rounded;
    return buffer;
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

using Event = std::unique_ptr<CUevent_st, FreeBy<cudaEventDestroy>>;
inline Result<Event> make_event() {
  cudaEvent_t event = nullptr;
  KVFERRY_TRY(cuda_result(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event"));
  return Event(event);
}
inline Result<bool> is_event_reached(cudaEvent_t event, const char* what) {
  const cudaError_t code = cudaEventQuery(event);
  if (code == cudaErrorNotReady) return false;
  KVFERRY_TRY(cuda_result(code, what));
  return true;
}

}  // namespace kvferry
