// The kernels, as functions that a C++ compiler can call.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/device/pack_plan.h"
#include "kernels/device/segment_hash.h"
#include "kernels/element_type.h"

namespace kvferry::cuda {

/// All of it by value or in device memory.
struct Launch {
  device::PackPlan plan;
  const device::PackJob* jobs;
  std::uint32_t num_jobs;
  std::uint64_t run_segments_max;  // of the jobs' runs, all layers
  std::uint64_t run_elements_max;
  device::LayerRange layers;
  device::SegmentSecret secret;
};

/// By 16 bytes a lane, for plans that is_vectorisable() allows and chunks at multiples of 16. hashes: into each job's
/// segments; for a scatter only if all runs are whole chunks and `layers` are all.
cudaError_t launch_gather(const Launch& launch, ElementType cache_type, ElementType chunk_type, bool hashes,
                          cudaStream_t stream);
cudaError_t launch_scatter(const Launch& launch, ElementType cache_type, ElementType chunk_type, bool hashes,
                           cudaStream_t stream);

/// An element a thread, whatever the layout.
cudaError_t launch_elements(const Launch& launch, ElementType cache_type, ElementType chunk_type, bool gathers,
                            cudaStream_t stream);

/// The segments of chunks that lie in device memory.
struct HashJob {
  const std::byte* bytes;
  std::uint64_t num_bytes;
  std::uint64_t* segments;
};
cudaError_t launch_hash(const HashJob* jobs, std::uint32_t num_jobs, std::uint64_t segments_max,
                        const device::SegmentSecret& secret, cudaStream_t stream);

/// Some bytes from one place to another, both of which the device reaches.
struct RangeJob {
  std::byte* to;
  const std::byte* from;
  std::uint64_t num_bytes;
};
cudaError_t launch_ranges(const RangeJob* jobs, std::uint32_t num_jobs, std::uint64_t bytes_max, cudaStream_t stream);

/// CUDA's limit of a grid's height, which is a launch's number of jobs.
constexpr std::uint32_t kJobsMax = 65535;

}  // namespace kvferry::cuda
