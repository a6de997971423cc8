// Which GPU the calling thread's CUDA calls go to.
#pragma once

#include <cuda_runtime.h>

namespace kvferry {

/// Makes a device current for as long as it lives: an engine's thread may have another one.
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
