// Pinned host memory for small tables that the GPU reads and writes. Private to this folder.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "kernels/cuda/cuda_memory.h"

namespace kvferry {

/// Pinned host memory, which the device copies from and to directly.
struct PinnedBuffer {
  std::unique_ptr<std::byte, FreeBy<cudaFreeHost>> memory;
  std::size_t bytes = 0;
  std::byte* data() const { return memory.get(); }
};

/// Reuses pinned buffers: allocating one takes longer than a transfer, and freeing one waits for all kernels that run.
/// Threads: any; the GPU must be the calling thread's current one.
class PinnedPool {
 public:
  Result<PinnedBuffer> take(std::size_t bytes);
  /// Keeps the buffer for take(), or frees it if more than kKeptBytes would be kept.
  void give_back(PinnedBuffer buffer);
  /// Frees the buffers that are not taken.
  void clear();

  static constexpr std::size_t kKeptBytes = std::size_t{64} << 20;

 private:
  std::mutex mutex_;
  std::multimap<std::size_t, PinnedBuffer> free_;  // key: size in bytes
  std::size_t free_bytes_ = 0;
};

}  // namespace kvferry
