// Computes chunk_checksum() of ranges of GPU memory. Private to this folder.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "kernels/cuda/pinned_pool.h"
#include "transport/base/checksum.h"
#include "transport/base/device.h"

namespace kvferry {

/// Enqueues the checksums of the ranges. Device `ordinal` must be current; `pinned` must outlive the returned object.
Result<std::unique_ptr<Device::Checksums>> start_cuda_checksums(PinnedPool& pinned, int ordinal,
                                                                std::span<const std::span<const std::byte>> ranges,
                                                                cudaStream_t stream);

inline std::uint64_t num_segments(std::uint64_t bytes) { return (bytes + kSegmentBytes - 1) / kSegmentBytes; }
/// Returns the checksums of ranges; range i has range_bytes[i] bytes. `segments`: the hashes of all ranges' segments in
/// order.
std::vector<std::uint64_t> checksums_of(std::span<const std::uint64_t> range_bytes, const std::byte* segments);

}  // namespace kvferry
