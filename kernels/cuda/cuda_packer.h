// The packer for CUDA GPUs.
#pragma once

#include <memory>

#include "kernels/stream_packer.h"

namespace kvferry {

/// Makes a packer for a cache in the memory of the GPU with this number. Errors: those of make_host_packer(), and
/// kUnavailable if CUDA has no such GPU.
Result<std::unique_ptr<StreamPacker>> make_cuda_packer(int ordinal, KvLayout layout, ChunkFormat format = {});

}  // namespace kvferry
