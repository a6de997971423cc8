#include <cstdint>
#include <map>
#include <mutex>

#include "kernels/cuda/cuda_memory.h"

namespace kvferry {

Result<cudaMemPool_t> memory_pool(int ordinal) {
  static std::mutex mutex;
  static std::map<int, cudaMemPool_t> pools;  // never destroyed: at the process's end CUDA may be gone already
  const std::lock_guard lock(mutex);
  if (const auto made = pools.find(ordinal); made != pools.end()) return made->second;
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = ordinal;
  cudaMemPool_t pool = nullptr;
  KVFERRY_TRY(cuda_result(cudaMemPoolCreate(&pool, &properties), "creating a memory pool"));
  std::uint64_t keeps = UINT64_MAX;
  if (Result<void> ok = cuda_result(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keeps),
                                    "setting a memory pool's threshold");
      !ok) {
    cudaMemPoolDestroy(pool);
    return std::move(ok).error();
  }
  return pools[ordinal] = pool;
}

}  // namespace kvferry
