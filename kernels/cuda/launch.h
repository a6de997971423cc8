// Functions that launch the kernels, callable from plain C++.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/device/pack_plan.h"
#include "kernels/device/segment_hash.h"
#include "kernels/element_type.h"

namespace kvferry::cuda {

/// Arguments of a launch; pointers are to device memory.
struct Launch {
  device::PackPlan plan;
  const device::PackJob* jobs;
  std::uint32_t num_jobs;
  std::uint64_t run_segments_max;  // largest number of segments that one job's run has in all layers together
  std::uint64_t run_elements_max;
  device::LayerRange layers;
  device::SegmentSecret secret;
};

/// Each thread copies 16 bytes at a time. The plan must be is_vectorisable(), and chunk addresses multiples of 16. With
/// `hashes` the kernel also fills each job's `segments`; in a scatter, all runs must then be whole chunks, and `layers`
/// must be all layers.
cudaError_t launch_gather(const Launch& launch, ElementType cache_type, ElementType chunk_type, bool hashes,
                          cudaStream_t stream);
cudaError_t launch_scatter(const Launch& launch, ElementType cache_type, ElementType chunk_type, bool hashes,
                           cudaStream_t stream);

/// Each thread copies one element at a time, for any layout.
cudaError_t launch_elements(const Launch& launch, ElementType cache_type, ElementType chunk_type, bool gathers,
                            cudaStream_t stream);

/// Bytes that the device can access and whose checksum segments it must hash.
struct HashJob {
  const std::byte* bytes;
  std::uint64_t num_bytes;
  std::uint64_t* segments;
};
cudaError_t launch_hash(const HashJob* jobs, std::uint32_t num_jobs, std::uint64_t segments_max,
                        const device::SegmentSecret& secret, cudaStream_t stream);

/// Bytes to copy between two addresses that the device can access.
struct RangeJob {
  std::byte* to;
  const std::byte* from;
  std::uint64_t num_bytes;
};
cudaError_t launch_ranges(const RangeJob* jobs, std::uint32_t num_jobs, std::uint64_t bytes_max, cudaStream_t stream);

/// Calls `launch`, which launches a kernel, and returns the launch's error. The errors that earlier calls left on this
/// thread are cleared first, since cudaGetLastError() would return them as the launch's.
template <class Call>
cudaError_t launched(Call launch) {
  cudaGetLastError();
  launch();
  return cudaGetLastError();
}

/// Maximum of jobs in a launch: CUDA's limit for the height of a grid.
constexpr std::uint32_t kJobsMax = 65535;

}  // namespace kvferry::cuda
