// What the benchmarks on a GPU share: clocks, medians, and the sizes of a cache with its jobs.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "kernels/stream_packer.h"
#include "tests/kernels/test_cache.h"
#include "transport/base/check.h"

namespace kvferry {

inline void must(cudaError_t code) { KVFERRY_CHECK(code == cudaSuccess, "CUDA: {}", cudaGetErrorString(code)); }
inline void must(const Result<void>& result) { KVFERRY_CHECK(result, "{}", result.error().what); }
template <class T>
T must(Result<T> result) {
  KVFERRY_CHECK(result, "{}", result.error().what);
  return *std::move(result);
}

inline double median(std::vector<double> values) {
  KVFERRY_CHECK(!values.empty(), "no values");
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Returns the milliseconds that the host spends in `call`.
template <class Call>
double host_ms(Call call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

/// Returns the milliseconds between two events, the second of which has been reached.
inline double device_ms_between(cudaEvent_t begin, cudaEvent_t end) {
  float ms = 0;
  must(cudaEventElapsedTime(&ms, begin, end));
  return double{ms};
}

/// Returns the milliseconds that the GPU needs for one of `calls` calls, which enqueue work on the stream.
template <class Call>
double device_ms(cudaStream_t stream, int calls, Call call) {
  cudaEvent_t begin = nullptr, end = nullptr;
  must(cudaEventCreate(&begin));
  must(cudaEventCreate(&end));
  must(cudaEventRecord(begin, stream));
  for (int i = 0; i < calls; ++i) call();
  must(cudaEventRecord(end, stream));
  must(cudaEventSynchronize(end));
  const double ms = device_ms_between(begin, end);
  must(cudaEventDestroy(begin));
  must(cudaEventDestroy(end));
  return ms / calls;
}

inline double gb_per_s(std::uint64_t bytes, double ms) { return static_cast<double>(bytes) / ms / 1e6; }

/// Llama-3.1-8B in bf16 with one rank: 128 KiB a token. `blocks` blocks of 16 tokens.
inline CacheShape llama_8b(std::uint32_t blocks, const char* order) {
  return {.layers = 32,
          .blocks = blocks,
          .planes = 2,
          .heads = 8,
          .block_tokens = 16,
          .head_dim = 128,
          .element_bytes = 2,
          .order = order};
}

/// Returns blocks [first, end) in random order.
inline std::vector<BlockId> shuffled(BlockId first, BlockId end, std::uint32_t seed) {
  std::vector<BlockId> blocks(static_cast<std::size_t>(end - first));
  std::iota(blocks.begin(), blocks.end(), first);
  std::shuffle(blocks.begin(), blocks.end(), std::mt19937(seed));
  return blocks;
}

}  // namespace kvferry
