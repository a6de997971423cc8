#include "kernels/cuda/driver_api.h"

#include <cuda_runtime.h>

#include "kernels/cuda/cuda_memory.h"

namespace kvferry {

Result<void*> driver_function(const char* name, unsigned since) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult state = cudaDriverEntryPointSymbolNotFound;
  KVFERRY_TRY(cuda_result(cudaGetDriverEntryPointByVersion(name, &found, since, cudaEnableDefault, &state), name));
  if (found == nullptr) return Error{ErrorCode::kUnavailable, fmt::format("the GPU's driver has no {}()", name)};
  return found;
}

}  // namespace kvferry
