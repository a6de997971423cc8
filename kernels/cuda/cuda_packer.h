// The packer of CUDA GPUs.
#pragma once

#include <memory>

#include "kernels/stream_packer.h"

namespace kvferry {

/// Memory of the packer and of its passes belongs to the device that is current now, which has to be current in all
/// calls. kInvalidArgument: as make_host_packer(). kUnavailable: there is no GPU that CUDA can use, and why.
Result<std::unique_ptr<StreamPacker>> make_cuda_packer(KvLayout layout, ChunkFormat format = {});

}  // namespace kvferry
