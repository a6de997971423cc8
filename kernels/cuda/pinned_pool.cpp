#include "kernels/cuda/pinned_pool.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace kvferry {
namespace {

constexpr std::size_t kSmallest = 64 << 10;

}  // namespace

Result<PinnedBuffer> PinnedPool::take(std::size_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto fits = free_.lower_bound(bytes); fits != free_.end()) {
      PinnedBuffer taken = std::move(fits->second);
      free_bytes_ -= taken.bytes;
      free_.erase(fits);
      return taken;
    }
  }
  const std::size_t rounded = std::bit_ceil(std::max(bytes, kSmallest));
  void* made = nullptr;
  KVFERRY_TRY(cuda_result(cudaHostAlloc(&made, rounded, cudaHostAllocPortable), "cannot allocate pinned host memory"));
  PinnedBuffer buffer;
  buffer.memory.reset(static_cast<std::byte*>(made));
  buffer.bytes = rounded;
  return buffer;
}

void PinnedPool::give_back(PinnedBuffer buffer) {
  if (buffer.data() == nullptr) return;
  const std::lock_guard lock(mutex_);
  if (free_bytes_ + buffer.bytes > kKeptBytes) return;
  free_bytes_ += buffer.bytes;
  const std::size_t bytes = buffer.bytes;
  free_.emplace(bytes, std::move(buffer));
}

void PinnedPool::clear() {
  std::multimap<std::size_t, PinnedBuffer> freed;
  const std::lock_guard lock(mutex_);
  freed.swap(free_);
  free_bytes_ = 0;
}

}  // namespace kvferry
