// Computes chunk_checksum() of ranges of GPU memory. Private to this folder.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>
#include <span>

#include "kernels/cuda/cuda_memory.h"
#include "transport/base/device.h"

namespace kvferry {

/// The device with this number must be current; `pinned` must outlive the returned object.
Result<std::unique_ptr<Device::Checksums>> start_cuda_checksums(PinnedPool& pinned, int ordinal,
                                                                std::span<const std::span<const std::byte>> ranges,
                                                                cudaStream_t stream);

}  // namespace kvferry
