// Helpers for CUDA: error codes as Results, and owners of memory and events. Private to this folder.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>
#include <utility>

#include "transport/base/result.h"

namespace kvferry {

/// Returns kFull if memory is exhausted, kUnavailable for any other error of CUDA. CUDA keeps an error for each thread
/// until it is read; it is cleared here, because the engine would take it for an error of its own next launch.
inline Result<void> cuda_result(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return {};
  cudaGetLastError();
  const ErrorCode error = code == cudaErrorMemoryAllocation ? ErrorCode::kFull : ErrorCode::kUnavailable;
  return Error{error, fmt::format("{}: {} ({})", what, cudaGetErrorString(code), cudaGetErrorName(code))};
}

/// Deleter for std::unique_ptr, which calls one of CUDA's functions.
template <auto free>
struct FreeBy {
  template <class Value>
  void operator()(Value* value) const {
    free(value);
  }
};

/// Returns kvferry's memory pool of the GPU, which is made at the first call and kept until the process ends. It keeps
/// all memory that it once had: the default pool returns its memory to the driver at every synchronisation, and asking
/// for it again takes 100 microseconds instead of 3.
Result<cudaMemPool_t> memory_pool(int ordinal);

/// Owns device memory from the GPU's memory_pool(), which is freed in stream order, without waiting.
class StreamBuffer {
 public:
  StreamBuffer() = default;
  StreamBuffer(const StreamBuffer&) = delete;
  StreamBuffer& operator=(const StreamBuffer&) = delete;
  ~StreamBuffer() { free(); }
  Result<void> allocate(std::size_t bytes, int ordinal, cudaStream_t stream) {
    cudaMemPool_t pool = KVFERRY_TRY(memory_pool(ordinal));
    stream_ = stream;
    return cuda_result(cudaMallocFromPoolAsync(&data_, bytes, pool, stream), "allocating GPU memory");
  }
  void free() {
    if (data_ != nullptr) cudaFreeAsync(std::exchange(data_, nullptr), stream_);
  }
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_ = nullptr;
  cudaStream_t stream_ = nullptr;
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
