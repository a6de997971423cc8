#include "kernels/cuda/driver_api.h"

#include <cuda_runtime.h>

#include "kernels/cuda/cuda_memory.h"

namespace kvferry {

Result<void*> driver_function(const char* name, unsigned since) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult state = cudaDriverEntryPointSymbolNotFound;
  if (Result<void> ok =
          cuda_result(cudaGetDriverEntryPointByVersion(name, &found, since, cudaEnableDefault, &state), name);
      !ok)
    return std::move(ok).error().with("cannot look for a function of the GPU's driver");
  if (found == nullptr)
    return Error{ErrorCode::kUnavailable, fmt::format("the GPU's driver has no function {}; it may be too old", name)};
  return found;
}

}  // namespace kvferry
