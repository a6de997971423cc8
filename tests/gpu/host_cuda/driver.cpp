// The version of the simulated driver.
#include <cuda_runtime_api.h>

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
