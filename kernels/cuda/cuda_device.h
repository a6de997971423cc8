// Device and packer for a CUDA GPU.
#pragma once

#include <memory>

#include "kernels/stream_packer.h"
#include "transport/base/device.h"

namespace kvferry {

/// Returns the GPU with this number as a Device. Errors: kUnavailable if CUDA has no such GPU or can't query it.
Result<std::shared_ptr<Device>> make_cuda_device(int ordinal);

/// Makes a packer for a cache in the memory of the GPU with this number, which must exist. Errors: those of
/// make_host_packer(), kFull if GPU memory is exhausted, and kUnavailable if another call of CUDA fails.
Result<std::unique_ptr<StreamPacker>> make_cuda_packer(int ordinal, KvLayout layout, ChunkFormat format = {});

}  // namespace kvferry
