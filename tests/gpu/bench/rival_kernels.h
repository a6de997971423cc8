// Kernels that stand for an engine's work in benchmarks: one is limited by memory, the other by arithmetic.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace kvferry {

/// Adds to the floats of `bytes` bytes of GPU memory: as many bytes read as written. `launches` launches, one after
/// another, of many short thread blocks each.
cudaError_t launch_memory_rival(std::byte* memory, std::size_t bytes, int launches, cudaStream_t stream);
/// Keeps all processors of the GPU multiplying. `launches` launches of about a tenth of a millisecond each. Touches no
/// memory.
cudaError_t launch_compute_rival(int launches, cudaStream_t stream);
/// Reads `bytes` bytes of memory and writes nothing: the limit of a checksum.
cudaError_t launch_read(const std::byte* memory, std::size_t bytes, cudaStream_t stream);
/// Does nothing: the limit of a launch.
cudaError_t launch_nothing(cudaStream_t stream);

}  // namespace kvferry
