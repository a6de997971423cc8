#include <algorithm>

#include "kernels/cuda/launch.h"
#include "kernels/device/copy_elements.h"
#include "kernels/device/copy_range.h"
#include "kernels/device/copy_segment.h"

namespace kvferry::cuda {
namespace {

using namespace device;

constexpr std::uint32_t kThreads = 128;
constexpr std::uint32_t kSegmentsPerBlock = kThreads / kHashLanes;

__device__ std::uint64_t sum_of_lanes(std::uint64_t part) {
  const unsigned group = 0xFU << (threadIdx.x % 32 & ~3U);
  part += __shfl_xor_sync(group, part, 1);
  return part + __shfl_xor_sync(group, part, 2);
}

/// Copies the secret to shared memory, where four lanes read different words in one access.
__device__ void share_secret(SegmentSecret& shared, const SegmentSecret& secret) {
  constexpr std::uint32_t kWords = sizeof(SegmentSecret) / sizeof(std::uint64_t);
  for (std::uint32_t i = threadIdx.x; i < kWords; i += kThreads)
    reinterpret_cast<std::uint64_t*>(&shared)[i] = reinterpret_cast<const std::uint64_t*>(&secret)[i];
  __syncthreads();
}

template <class Format, bool kGathers, bool kHashes>
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ Launch launch) {
  __shared__ SegmentSecret secret;
  if constexpr (kHashes) share_secret(secret, launch.secret);
  const PackJob job = launch.jobs[blockIdx.y];
  if (job.num_tokens == 0) return;
  const std::uint64_t layer_bytes = launch.plan.layer_bytes(job.num_tokens);
  const std::uint64_t first = launch.layers.first * layer_bytes / kSegment;
  const std::uint64_t segment = first + std::uint64_t{blockIdx.x} * kSegmentsPerBlock + threadIdx.x / kHashLanes;
  if (segment * kSegment >= launch.layers.end * layer_bytes) return;  // all four lanes of the segment return here
  const std::uint32_t lane = threadIdx.x % kHashLanes;
  LanePart part;
  if constexpr (kGathers)
    part = gather_segment<Format, kHashes>(launch.plan, job, launch.layers, secret, segment, lane);
  else
    part = scatter_segment<Format, kHashes>(launch.plan, job, launch.layers, secret, segment, lane);
  if constexpr (kHashes) {
    const std::uint64_t sum = sum_of_lanes(part.part);
    if (lane == 0 && part.is_whole) job.segments[segment] = SegmentLane::finish(sum);
  }
}

template <class Element, bool kGathers>
__global__ void __launch_bounds__(kThreads) element_kernel(const __grid_constant__ Launch launch) {
  const PackJob job = launch.jobs[blockIdx.y];
  if (job.num_tokens == 0) return;
  const std::uint64_t layer_elements = launch.plan.layer_bytes(job.num_tokens) / launch.plan.chunk_element_bytes;
  const std::uint64_t end = launch.layers.end * layer_elements;
  const std::uint64_t step = std::uint64_t{gridDim.x} * kThreads;
  for (std::uint64_t i = launch.layers.first * layer_elements + std::uint64_t{blockIdx.x} * kThreads + threadIdx.x;
       i < end; i += step)
    copy_element<Element, kGathers>(launch.plan, job, i);
}

__global__ void __launch_bounds__(kThreads)
    hash_kernel(const HashJob* jobs, const __grid_constant__ SegmentSecret from) {
  __shared__ SegmentSecret secret;
  share_secret(secret, from);
  const HashJob job = jobs[blockIdx.y];
  const std::uint64_t segment = std::uint64_t{blockIdx.x} * kSegmentsPerBlock + threadIdx.x / kHashLanes;
  if (segment * kSegment >= job.num_bytes) return;
  const std::uint32_t lane = threadIdx.x % kHashLanes;
  const std::uint64_t sum = sum_of_lanes(hash_segment(job.bytes, job.num_bytes, secret, segment, lane));
  if (lane == 0) job.segments[segment] = SegmentLane::finish(sum);
}

constexpr std::uint32_t kTileVecs = 4;  // number of vectors that a thread copies in a tile
constexpr std::uint64_t kTileBytes = kThreads * kTileVecs * kVecBytes;

__global__ void __launch_bounds__(kThreads) range_kernel(const RangeJob* jobs) {
  const RangeJob job = jobs[blockIdx.y];
  for (std::uint64_t tile = blockIdx.x; tile * kTileBytes < job.num_bytes; tile += gridDim.x)
    copy_tile(job.to, job.from, job.num_bytes, tile * kTileBytes, kTileVecs, threadIdx.x, kThreads);
}

constexpr std::uint32_t blocks_for(std::uint64_t segments) {
  return static_cast<std::uint32_t>((segments + kSegmentsPerBlock - 1) / kSegmentsPerBlock);
}

/// Calls call(Format{}, Element{}) with the classes that convert the two types.
template <class Call>
void with_format(ElementType cache_type, ElementType chunk_type, Call call) {
  const auto with_cache = [&]<class Cache>(Cache) {
    if (chunk_type == ElementType::kE4m3)
      call(Converted<Cache, E4m3>{}, ConvertedElement<Cache, E4m3>{});
    else
      call(Converted<Cache, E5m2>{}, ConvertedElement<Cache, E5m2>{});
  };
  if (cache_type == chunk_type)
    call(SameBytes{}, SameElement{});
  else if (cache_type == ElementType::kBf16)
    with_cache(Bf16{});
  else if (cache_type == ElementType::kFp16)
    with_cache(Fp16{});
  else
    with_cache(Fp32{});
}

template <bool kGathers>
cudaError_t launch_copy(const Launch& launch, ElementType cache_type, ElementType chunk_type, bool hashes,
                        cudaStream_t stream) {
  // The layers may begin and end inside a segment, so up to two segments more than their size are touched.
  const std::uint64_t layers = launch.layers.end - launch.layers.first;
  const std::uint64_t segments = launch.run_segments_max * layers / launch.plan.num_layers + 2;
  const dim3 grid(blocks_for(segments), launch.num_jobs);
  return launched([&] {
    with_format(cache_type, chunk_type, [&]<class Format, class Element>(Format, Element) {
      if (hashes)
        copy_kernel<Format, kGathers, true><<<grid, kThreads, 0, stream>>>(launch);
      else
        copy_kernel<Format, kGathers, false><<<grid, kThreads, 0, stream>>>(launch);
    });
  });
}

}  // namespace

cudaError_t launch_gather(const Launch& launch, ElementType cache_type, ElementType chunk_type, bool hashes,
                          cudaStream_t stream) {
  return launch_copy<true>(launch, cache_type, chunk_type, hashes, stream);
}

cudaError_t launch_scatter(const Launch& launch, ElementType cache_type, ElementType chunk_type, bool hashes,
                           cudaStream_t stream) {
  return launch_copy<false>(launch, cache_type, chunk_type, hashes, stream);
}

cudaError_t launch_elements(const Launch& launch, ElementType cache_type, ElementType chunk_type, bool gathers,
                            cudaStream_t stream) {
  constexpr std::uint64_t kBlocksMax = 1U << 16;
  const std::uint64_t wanted = (launch.run_elements_max + kThreads - 1) / kThreads;
  const dim3 grid(static_cast<std::uint32_t>(std::clamp<std::uint64_t>(wanted, 1, kBlocksMax)), launch.num_jobs);
  return launched([&] {
    with_format(cache_type, chunk_type, [&]<class Format, class Element>(Format, Element) {
      if (gathers)
        element_kernel<Element, true><<<grid, kThreads, 0, stream>>>(launch);
      else
        element_kernel<Element, false><<<grid, kThreads, 0, stream>>>(launch);
    });
  });
}

cudaError_t launch_hash(const HashJob* jobs, std::uint32_t num_jobs, std::uint64_t segments_max,
                        const SegmentSecret& secret, cudaStream_t stream) {
  const dim3 grid(std::max(1U, blocks_for(segments_max)), num_jobs);
  return launched([&] { hash_kernel<<<grid, kThreads, 0, stream>>>(jobs, secret); });
}

cudaError_t launch_ranges(const RangeJob* jobs, std::uint32_t num_jobs, std::uint64_t bytes_max, cudaStream_t stream) {
  constexpr std::uint64_t kBlocksMax = 1U << 12;
  const std::uint64_t wanted = (bytes_max + kTileBytes - 1) / kTileBytes;
  const dim3 grid(static_cast<std::uint32_t>(std::clamp<std::uint64_t>(wanted, 1, kBlocksMax)), num_jobs);
  return launched([&] { range_kernel<<<grid, kThreads, 0, stream>>>(jobs); });
}

}  // namespace kvferry::cuda
