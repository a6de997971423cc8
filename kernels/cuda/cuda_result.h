// CUDA's return codes as Results.
#pragma once

#include <cuda_runtime.h>

#include "transport/base/result.h"

namespace kvferry {

/// kFull for memory that there is not, kUnavailable for all else.
inline Result<void> cuda_result(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return {};
  const ErrorCode error = code == cudaErrorMemoryAllocation ? ErrorCode::kFull : ErrorCode::kUnavailable;
  return Error{error, fmt::format("{}: {} ({})", what, cudaGetErrorString(code), cudaGetErrorName(code))};
}

}  // namespace kvferry
