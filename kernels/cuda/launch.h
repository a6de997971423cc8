// Functions that launch the kernels, callable from plain C++.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/pack_jobs.h"
#include "kernels/device/pack_plan.h"
#include "kernels/device/segment_hash.h"
#include "kernels/element_type.h"

namespace kvferry::cuda {

/// Arguments of a launch besides its jobs; pointers are to device memory.
struct Launch {
  device::PackPlan plan;
  device::LayerRange layers;
  device::SegmentSecret secret;
  std::uint64_t run_segments_max;  // largest number of segments that one job's run has in all layers together
  std::uint64_t run_elements_max;
};

/// launch_gather() and launch_scatter() launch kernels whose threads copy 16 bytes at a time. The plan must be
/// is_vectorisable(), and chunk addresses multiples of 16. With `hashes` the kernel also writes to each job's
/// `segments` the hashes of the segments that end in `layers`; `segments` may be in pinned host memory. In a scatter,
/// all runs must then be whole chunks, and `layers` must be all layers.
cudaError_t launch_gather(const Launch& launch, const PackJobs& jobs, ElementType cache_type, ElementType chunk_type,
                          bool hashes, cudaStream_t stream);
cudaError_t launch_scatter(const Launch& launch, const PackJobs& jobs, ElementType cache_type, ElementType chunk_type,
                           bool hashes, cudaStream_t stream);

/// Launches a kernel whose threads copy one element at a time, for any layout.
cudaError_t launch_elements(const Launch& launch, const PackJobs& jobs, ElementType cache_type, ElementType chunk_type,
                            bool gathers, cudaStream_t stream);

/// Hashes the segments of each job, whose `segments` may be in pinned host memory.
cudaError_t launch_hash(const HashJobs& jobs, const device::SegmentSecret& secret, cudaStream_t stream);

/// Bytes to copy between two addresses that the device can access.
struct RangeJob {
  std::byte* to;
  const std::byte* from;
  std::uint64_t num_bytes;
};
/// Launches a kernel that copies the ranges. `jobs` may be in pinned host memory. `bytes_max`: the largest job's number
/// of bytes.
cudaError_t launch_ranges(const RangeJob* jobs, std::uint32_t num_jobs, std::uint64_t bytes_max, cudaStream_t stream);

/// Calls `launch`, which launches a kernel, and returns the launch's error. The errors that earlier calls left on this
/// thread are cleared first, since cudaGetLastError() would return them as the launch's.
template <class Call>
cudaError_t launched(Call launch) {
  cudaGetLastError();
  launch();
  return cudaGetLastError();
}

/// Maximum number of jobs in a launch of ranges, and of chunks in a pass: CUDA's limit for the height of a grid.
constexpr std::uint32_t kJobsMax = 65535;

}  // namespace kvferry::cuda
