// cuda_leaks() of CUDA itself; the simulated CUDA has its own.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <cstdint>

#include "kernels/cuda/current_device.h"
#include "tests/gpu/gpu_environment.h"

namespace kvferry {

std::vector<std::string> cuda_leaks() {
  std::vector<std::string> leaks;
  if (!has_context(0)) return leaks;
  cudaMemPool_t pool = nullptr;
  cudaDeviceGetDefaultMemPool(&pool, 0);
  std::uint64_t used = 0;
  cudaDeviceSynchronize();
  if (cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used) != cudaSuccess || used > 0)
    leaks.push_back(fmt::format("cuda:0: {} bytes of its memory pool", used));
  return leaks;
}

}  // namespace kvferry
