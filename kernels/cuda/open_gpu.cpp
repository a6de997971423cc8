#include <utility>

#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_packer.h"

namespace kvferry {

Result<Gpu> open_gpu(int ordinal) {
  Result<std::shared_ptr<Device>> device = make_cuda_device(ordinal);
  if (!device) return std::move(device).error();
  return Gpu{std::move(*device), [ordinal](KvLayout layout, ChunkFormat format) {
               return make_cuda_packer(ordinal, std::move(layout), std::move(format));
             }};
}

}  // namespace kvferry
