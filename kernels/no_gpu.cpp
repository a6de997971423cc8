#include "kernels/stream_packer.h"

namespace kvferry {

Result<Gpu> open_gpu(int) {
  return Error{ErrorCode::kUnavailable, "this build of kvferry has no CUDA; build it with -DKVFERRY_CUDA=ON"};
}

std::string gpu_support() { return "no CUDA kernels"; }

}  // namespace kvferry
