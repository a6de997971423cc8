// The packer of CUDA GPUs.
#pragma once

#include <memory>

#include "kernels/stream_packer.h"

namespace kvferry {

/// For a cache in the memory of the GPU with this number. kInvalidArgument: as make_host_packer(). kUnavailable: there
/// is no GPU that CUDA can use, and why.
Result<std::unique_ptr<StreamPacker>> make_cuda_packer(int ordinal, KvLayout layout, ChunkFormat format = {});

}  // namespace kvferry
