// Selects the GPU of the calling thread's CUDA calls.
#pragma once

#include <cuda_runtime.h>

namespace kvferry {

/// Makes a device current during its lifetime, and restores the device that the thread had before.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal) {
    cudaGetDevice(&before_);
    if (before_ != ordinal) cudaSetDevice(ordinal);
    is_changed_ = before_ != ordinal;
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() {
    if (is_changed_) cudaSetDevice(before_);
  }

 private:
  int before_ = 0;
  bool is_changed_ = false;
};

}  // namespace kvferry
