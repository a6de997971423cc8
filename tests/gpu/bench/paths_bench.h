// The sections of gpu_paths_bench. Each prints a table whose figures are medians, beside the physical limit that was
// measured in turn with them.
#pragma once

#include "tests/gpu/bench/pack_setup.h"

namespace kvferry {

struct PathsBench {
  std::shared_ptr<Device> device;
  DeviceStream stream;  // of the passes and copies

  cudaStream_t cuda_stream() const { return static_cast<cudaStream_t>(stream); }
};

/// Copies between GPU memory and pinned host memory, by the copy engines: up, down, and both at once.
void bench_dma(const PathsBench& bench);
/// Time to pin host memory: pages of 4 KiB, pages of 2 MiB, and the memory of a chunk pool.
void bench_pinning(const PathsBench& bench);
/// Checksums alone, of GPU memory and of pinned host memory.
void bench_hash(const PathsBench& bench);
/// Gather and scatter of vLLM's layouts, from and to GPU memory and pinned host memory.
void bench_layouts(const PathsBench& bench);
/// Time that the host spends to start a pass.
void bench_host_time(const PathsBench& bench);
/// Slowdown of another kernel while passes and copies run.
void bench_rivals(const PathsBench& bench);
/// What others do in the place of a gather: one copy for each block, and one batch of copies.
void bench_block_copies(const PathsBench& bench);

}  // namespace kvferry
