// CUDA's return codes as Results.
#pragma once

#include <cuda_runtime.h>

#include "transport/base/result.h"

namespace kvferry {

/// Returns kFull if memory is exhausted, kUnavailable for any other error of CUDA.
inline Result<void> cuda_result(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return {};
  const ErrorCode error = code == cudaErrorMemoryAllocation ? ErrorCode::kFull : ErrorCode::kUnavailable;
  return Error{error, fmt::format("{}: {} ({})", what, cudaGetErrorString(code), cudaGetErrorName(code))};
}

}  // namespace kvferry
