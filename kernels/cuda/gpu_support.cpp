#include "kernels/cuda/gpu_support.h"

#include "kernels/stream_packer.h"

namespace kvferry {
namespace {

std::string version_name(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

}  // namespace

std::string gpu_support() {
  return fmt::format("CUDA kernels for {}; runtime of CUDA {}", KVFERRY_CUDA_TARGETS, version_name(CUDART_VERSION));
}

std::string explain_no_gpus(cudaError_t code, int driver) {
  // CUDA's runtime works with the drivers of all minor versions of its major version, and with later drivers.
  const std::string needed = fmt::format("a driver for CUDA {}.0 or later", CUDART_VERSION / 1000);
  if (code == cudaErrorNoDevice) return "NVIDIA's driver finds no GPU on this host";
  if (code != cudaErrorInsufficientDriver)
    return fmt::format("cannot count the GPUs: {} ({})", cudaGetErrorString(code), cudaGetErrorName(code));
  if (driver == 0)
    return fmt::format("this host has no NVIDIA driver (the loader finds no libcuda.so.1); GPUs need {}", needed);
  return fmt::format("this host's NVIDIA driver is for CUDA {}, but this build of kvferry needs {}",
                     version_name(driver), needed);
}

Result<int> count_gpus() {
  int count = 0, driver = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code == cudaSuccess) return count;
  static_cast<void>(cudaDriverGetVersion(&driver));
  return Error{ErrorCode::kUnavailable, explain_no_gpus(code, driver)};
}

}  // namespace kvferry
