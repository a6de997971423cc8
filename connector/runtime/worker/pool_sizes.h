// The sizes of a rank's pools of host memory and of GPU memory if the settings don't give them.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvferry {

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

/// Returns the default of `pool_bytes`: a sixteenth of the free host memory, since a host may have eight ranks. It is
/// at most 16 GiB, which can be reserved within seconds, and at least 1 GiB, or half of the free memory if that is
/// less.
constexpr std::uint64_t default_pool_bytes(std::uint64_t free_bytes) {
  return std::min(std::max(free_bytes / 16, std::min(kGiB, free_bytes / 2)), 16 * kGiB);
}

/// Returns the default of `gpu_pool_bytes`. Of the GPU memory that the engine has left free, 1 GiB is left for its
/// graphs and libraries. The default is half of the rest, and at most `pool_bytes`, the size of the pool of host
/// memory, because each chunk in GPU memory is also in host memory.
constexpr std::uint64_t default_gpu_pool_bytes(std::uint64_t free_on_gpu, std::uint64_t pool_bytes) {
  return std::min(free_on_gpu > kGiB ? (free_on_gpu - kGiB) / 2 : 0, pool_bytes);
}

}  // namespace kvferry
