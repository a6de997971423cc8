#include "tests/gpu/bench/rival_kernels.h"

namespace kvferry {
namespace {

constexpr int kThreads = 256;

constexpr int kVectorsPerThread = 4;
constexpr int kRounds = 600;

__global__ void __launch_bounds__(kThreads) memory_kernel(float4* memory, std::size_t count) {
  std::size_t i = std::size_t{blockIdx.x} * kThreads * kVectorsPerThread + threadIdx.x;
#pragma unroll
  for (int vector = 0; vector < kVectorsPerThread; ++vector, i += kThreads) {
    if (i >= count) return;
    float4 value = memory[i];
    value.x += 1.0F;
    value.w += 1.0F;
    memory[i] = value;
  }
}

__global__ void __launch_bounds__(kThreads) compute_kernel(float* never) {
  float a = 1.0F + static_cast<float>(threadIdx.x), b = 0.5F, c = 0.25F, d = 0.125F;
  for (int i = 0; i < kRounds; ++i) {
    a = a * 0.999F + b;
    b = b * 0.998F + c;
    c = c * 0.997F + d;
    d = d * 0.996F + a;
  }
  if (never != nullptr) *never = a + b + c + d;
}

__global__ void __launch_bounds__(kThreads) read_kernel(const uint4* memory, std::size_t count, unsigned never) {
  const std::size_t step = std::size_t{gridDim.x} * kThreads;
  unsigned sum = 0;
#pragma unroll 4
  for (std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    const uint4 value = memory[i];
    sum ^= value.x ^ value.y ^ value.z ^ value.w;
  }
  if (never != 0 && sum == never) __trap();
}

__global__ void nothing_kernel() {}

/// Returns enough thread blocks to fill every processor of the current GPU.
unsigned all_blocks() {
  static const unsigned blocks = [] {
    int device = 0, processors = 1;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    return static_cast<unsigned>(processors) * 8;
  }();
  return blocks;
}

}  // namespace

cudaError_t launch_memory_rival(std::byte* memory, std::size_t bytes, int launches, cudaStream_t stream) {
  const std::size_t count = bytes / sizeof(float4), each = std::size_t{kThreads} * kVectorsPerThread;
  for (int i = 0; i < launches; ++i)
    memory_kernel<<<static_cast<unsigned>((count + each - 1) / each), kThreads, 0, stream>>>(
        reinterpret_cast<float4*>(memory), count);
  return cudaGetLastError();
}

cudaError_t launch_compute_rival(int launches, cudaStream_t stream) {
  for (int i = 0; i < launches; ++i) compute_kernel<<<4 * all_blocks(), kThreads, 0, stream>>>(nullptr);
  return cudaGetLastError();
}

cudaError_t launch_read(const std::byte* memory, std::size_t bytes, cudaStream_t stream) {
  read_kernel<<<all_blocks(), kThreads, 0, stream>>>(reinterpret_cast<const uint4*>(memory), bytes / sizeof(uint4), 0);
  return cudaGetLastError();
}

cudaError_t launch_nothing(cudaStream_t stream) {
  nothing_kernel<<<1, 1, 0, stream>>>();
  return cudaGetLastError();
}

}  // namespace kvferry
