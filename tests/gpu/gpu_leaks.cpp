// cuda_leaks() of CUDA itself; the simulated CUDA has its own.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <cstdint>

#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/current_device.h"
#include "tests/gpu/gpu_environment.h"

namespace kvferry {

std::vector<std::string> cuda_leaks() {
  std::vector<std::string> leaks;
  if (!has_context(0)) return leaks;
  cudaMemPool_t by_default = nullptr;
  cudaDeviceGetDefaultMemPool(&by_default, 0);
  for (cudaMemPool_t pool : {by_default, memory_pool(0).value()}) {
    std::uint64_t used = 0;
    cudaDeviceSynchronize();
    if (cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used) != cudaSuccess || used > 0)
      leaks.push_back(fmt::format("cuda:0: {} bytes of a pool", used));
  }
  return leaks;
}

}  // namespace kvferry
