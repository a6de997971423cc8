// Helpers for CUDA: error codes as Results, and owners of events. Private to this folder.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "transport/base/result.h"

namespace kvferry {

/// Returns kFull if memory is exhausted, kUnavailable for any other error of CUDA. CUDA keeps a thread's last error
/// until it is read. The error is read here, because the engine would otherwise take it for an error of its own next
/// launch.
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

using Event = std::unique_ptr<CUevent_st, FreeBy<cudaEventDestroy>>;
inline Result<Event> make_event() {
  cudaEvent_t event = nullptr;
  KVFERRY_TRY(cuda_result(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cannot create a CUDA event"));
  return Event(event);
}
inline Result<bool> is_event_reached(cudaEvent_t event, const char* what) {
  const cudaError_t code = cudaEventQuery(event);
  if (code == cudaErrorNotReady) return false;
  KVFERRY_TRY(cuda_result(code, what));
  return true;
}

}  // namespace kvferry
