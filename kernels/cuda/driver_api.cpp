#include "kernels/cuda/driver_api.h"

#include <cuda_runtime.h>

#include "kernels/cuda/cuda_memory.h"

namespace kvferry {

Result<void*> driver_function(const char* name, [[maybe_unused]] unsigned since) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult state = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t code = cudaGetDriverEntryPointByVersion(name, &found, since, cudaEnableDefault, &state);
#else
  const cudaError_t code = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &state);
#endif
  KVFERRY_TRY(cuda_result(code, name));
  if (found == nullptr) return Error{ErrorCode::kUnavailable, fmt::format("the GPU's driver has no {}()", name)};
  return found;
}

}  // namespace kvferry
