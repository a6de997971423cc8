#include "kernels/cuda/current_device.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include "kernels/cuda/driver_api.h"

namespace kvferry {

bool has_context(int ordinal) {
  static const Result<void*> found = driver_function("cuDevicePrimaryCtxGetState", 7000);
  if (!found) return false;
  unsigned flags = 0;
  int is_active = 0;
  const auto get_state = reinterpret_cast<decltype(&::cuDevicePrimaryCtxGetState)>(*found);
  return get_state(ordinal, &flags, &is_active) == CUDA_SUCCESS && is_active != 0;
}

CurrentDevice::CurrentDevice(int ordinal) {
  if (cudaGetDevice(&before_) != cudaSuccess || before_ == ordinal) return;
  is_changed_ = has_context(before_);
  cudaSetDevice(ordinal);
}

CurrentDevice::~CurrentDevice() {
  if (is_changed_) cudaSetDevice(before_);
}

}  // namespace kvferry
