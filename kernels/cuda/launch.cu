#include <algorithm>
#include <type_traits>

#include "kernels/cuda/launch.h"
#include "kernels/device/copy_range.h"
#include "kernels/device/copy_segment.h"
#include "kernels/element_formats.h"

namespace kvferry::cuda {
namespace {

using namespace device;

constexpr std::uint32_t kThreads = 128;
constexpr std::uint32_t kSegmentsPerBlock = kThreads / kSegmentLanes;

/// Runs one of the kSegmentLanes lanes of a segment. With kHashes, every lane returns the hash of the whole segment if
/// lane.is_whole(), otherwise a number without meaning.
template <bool kHashes, class Lane>
__device__ std::uint64_t run_lane(Lane lane, std::uint32_t number, const SegmentSecret& secret) {
  const unsigned together = ((1U << kSegmentLanes) - 1) << (threadIdx.x % 32 / kSegmentLanes * kSegmentLanes);
  SegmentQuarter quarter(number % kQuarters);
#pragma unroll 1
  for (std::uint32_t block = 0; block < kBlocks; ++block) {
    BlockSums sums = lane.copy_block(secret, block);
    if constexpr (kHashes) {
      for (std::uint32_t other = kQuarters; other < kSegmentLanes; other *= 2) {
        sums.even += __shfl_xor_sync(together, sums.even, other);
        sums.odd += __shfl_xor_sync(together, sums.odd, other);
      }
      quarter.end_block(secret, block, sums);
    }
  }
  if constexpr (!kHashes) return 0;
  std::uint64_t parts = quarter.part(secret);
  for (std::uint32_t other = 1; other < kQuarters; other *= 2) parts += __shfl_xor_sync(together, parts, other);
  return SegmentQuarter::finish(parts);
}

/// Copies the secret to shared memory, where the lanes of a warp can read different words in one access.
__device__ void share_secret(SegmentSecret& shared, const SegmentSecret& secret) {
  constexpr std::uint32_t kWords = sizeof(SegmentSecret) / sizeof(std::uint64_t);
  for (std::uint32_t i = threadIdx.x; i < kWords; i += kThreads)
    reinterpret_cast<std::uint64_t*>(&shared)[i] = reinterpret_cast<const std::uint64_t*>(&secret)[i];
  __syncthreads();
}

/// Returns the index of the thread's first segment among the segments of one job that the launch covers.
__device__ std::uint64_t first_segment() {
  return std::uint64_t{blockIdx.x} * kSegmentsPerBlock + threadIdx.x / kSegmentLanes;
}
/// Returns how many segments the thread blocks of one job copy or hash at a time.
__device__ std::uint64_t segments_at_once() { return std::uint64_t{gridDim.x} * kSegmentsPerBlock; }

template <class Format, bool kGathers, bool kHashes>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(const __grid_constant__ Launch launch, const __grid_constant__ PackJobs jobs) {
  __shared__ SegmentSecret secret;
  if constexpr (kHashes) share_secret(secret, launch.secret);
  const PackJob job = jobs.at(blockIdx.y);
  if (job.num_tokens == 0) return;
  const std::uint64_t layer_bytes = launch.plan.layer_bytes(job.num_tokens);
  const std::uint64_t first = launch.layers.first * layer_bytes / kSegment;
  const std::uint32_t number = threadIdx.x % kSegmentLanes;
  using Lane = std::conditional_t<kGathers, GatherLane<Format, kHashes>, ScatterLane<Format, kHashes>>;
  // All lanes of a segment leave the loop together.
  for (std::uint64_t segment = first + first_segment(); segment * kSegment < launch.layers.end * layer_bytes;
       segment += segments_at_once()) {
    const Lane lane(launch.plan, job, launch.layers, segment, number);
    const std::uint64_t hash = run_lane<kHashes>(lane, number, secret);
    if (kHashes && number == 0 && lane.is_whole()) job.segments[segment] = hash;
  }
}

template <class Element, bool kGathers>
__global__ void __launch_bounds__(kThreads)
    element_kernel(const __grid_constant__ Launch launch, const __grid_constant__ PackJobs jobs) {
  const PackJob job = jobs.at(blockIdx.y);
  if (job.num_tokens == 0) return;
  const std::uint64_t layer_elements = launch.plan.layer_bytes(job.num_tokens) / launch.plan.chunk_element_bytes;
  const std::uint64_t end = launch.layers.end * layer_elements;
  const std::uint64_t step = std::uint64_t{gridDim.x} * kThreads;
  for (std::uint64_t i = launch.layers.first * layer_elements + std::uint64_t{blockIdx.x} * kThreads + threadIdx.x;
       i < end; i += step)
    copy_element<Element, kGathers>(launch.plan, job, i);
}

__global__ void __launch_bounds__(kThreads)
    hash_kernel(const __grid_constant__ HashJobs jobs, const __grid_constant__ SegmentSecret from) {
  __shared__ SegmentSecret secret;
  share_secret(secret, from);
  const HashJobs::Job job = jobs.jobs[blockIdx.y];
  const std::uint32_t number = threadIdx.x % kSegmentLanes;
  for (std::uint64_t segment = first_segment(); segment * kSegment < job.num_bytes; segment += segments_at_once()) {
    const std::uint64_t hash = run_lane<true>(HashLane(job.bytes, job.num_bytes, segment, number), number, secret);
    if (number == 0) job.segments[segment] = hash;
  }
}

__global__ void __launch_bounds__(kTileThreads) range_kernel(const RangeJob* jobs) {
  const RangeJob job = jobs[blockIdx.y];
  for (std::uint64_t tile = blockIdx.x; tile * kTileBytes < job.num_bytes; tile += gridDim.x)
    copy_tile(job.to, job.from, job.num_bytes, tile * kTileBytes, threadIdx.x);
}

constexpr std::uint64_t blocks_for(std::uint64_t segments) {
  return (segments + kSegmentsPerBlock - 1) / kSegmentsPerBlock;
}

/// Returns a grid with `blocks` blocks for each job, or fewer if the chunks are in host memory: kernels of other
/// streams begin only after the last block of this grid has begun, and so would wait for nearly all transfers over the
/// PCIe link.
dim3 grid_for(std::uint64_t blocks, std::uint32_t num_jobs, bool in_host_memory) {
  constexpr std::uint32_t kHostBlocks = 32;  // for up to 32 jobs together; they fill about 92 % of a PCIe 5 link
  if (in_host_memory) blocks = std::min<std::uint64_t>(blocks, std::max(1U, kHostBlocks / num_jobs));
  return {static_cast<unsigned>(blocks), num_jobs};
}

template <bool kGathers>
cudaError_t launch_copy(const Launch& launch, const PackJobs& jobs, ElementType cache_type, ElementType chunk_type,
                        bool hashes, cudaStream_t stream) {
  // The layers may begin and end inside a segment, so they may lie in up to two segments more than their bytes fill.
  const std::uint64_t layers = launch.layers.end - launch.layers.first;
  const std::uint64_t segments = launch.run_segments_max * layers / launch.plan.num_layers + 2;
  const dim3 grid = grid_for(blocks_for(segments), jobs.size(), jobs.in_host_memory());
  return launched([&] {
    with_format(cache_type, chunk_type, [&]<class Format, class Element>(Format, Element) {
      if constexpr (!std::is_same_v<Format, NoFormat>) {
        if (hashes)
          copy_kernel<Format, kGathers, true><<<grid, kThreads, 0, stream>>>(launch, jobs);
        else
          copy_kernel<Format, kGathers, false><<<grid, kThreads, 0, stream>>>(launch, jobs);
      }
    });
  });
}

}  // namespace

cudaError_t launch_gather(const Launch& launch, const PackJobs& jobs, ElementType cache_type, ElementType chunk_type,
                          bool hashes, cudaStream_t stream) {
  return launch_copy<true>(launch, jobs, cache_type, chunk_type, hashes, stream);
}

cudaError_t launch_scatter(const Launch& launch, const PackJobs& jobs, ElementType cache_type, ElementType chunk_type,
                           bool hashes, cudaStream_t stream) {
  return launch_copy<false>(launch, jobs, cache_type, chunk_type, hashes, stream);
}

cudaError_t launch_elements(const Launch& launch, const PackJobs& jobs, ElementType cache_type, ElementType chunk_type,
                            bool gathers, cudaStream_t stream) {
  constexpr std::uint64_t kBlocksMax = 1U << 16;
  const std::uint64_t wanted = (launch.run_elements_max + kThreads - 1) / kThreads;
  const dim3 grid = grid_for(std::clamp<std::uint64_t>(wanted, 1, kBlocksMax), jobs.size(), jobs.in_host_memory());
  return launched([&] {
    with_format(cache_type, chunk_type, [&]<class Format, class Element>(Format, Element) {
      if (gathers)
        element_kernel<Element, true><<<grid, kThreads, 0, stream>>>(launch, jobs);
      else
        element_kernel<Element, false><<<grid, kThreads, 0, stream>>>(launch, jobs);
    });
  });
}

cudaError_t launch_hash(const HashJobs& jobs, const device::SegmentSecret& secret, cudaStream_t stream) {
  std::uint64_t bytes_max = 1;
  for (std::uint32_t i = 0; i < jobs.num_jobs; ++i) bytes_max = std::max(bytes_max, jobs.jobs[i].num_bytes);
  const dim3 grid = grid_for(blocks_for((bytes_max + kSegment - 1) / kSegment), jobs.num_jobs, jobs.in_host_memory);
  return launched([&] { hash_kernel<<<grid, kThreads, 0, stream>>>(jobs, secret); });
}

cudaError_t launch_ranges(const RangeJob* jobs, std::uint32_t num_jobs, std::uint64_t bytes_max, cudaStream_t stream) {
  constexpr std::uint64_t kBlocksMax = 1U << 12;
  const std::uint64_t wanted = (bytes_max + kTileBytes - 1) / kTileBytes;
  const dim3 grid(static_cast<std::uint32_t>(std::clamp<std::uint64_t>(wanted, 1, kBlocksMax)), num_jobs);
  return launched([&] { range_kernel<<<grid, kTileThreads, 0, stream>>>(jobs); });
}

}  // namespace kvferry::cuda
