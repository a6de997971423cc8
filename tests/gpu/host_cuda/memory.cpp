// GPU memory, pinned memory, registered host memory, and memory pools.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>

#include "tests/gpu/host_cuda/simulated.h"

namespace kvferry::host_cuda {
namespace {

using Origin = Allocation::Origin;
constexpr std::uint64_t kPoolGrain = std::uint64_t{2} << 20;  // a pool asks the driver for multiples of this

std::uint64_t rounded(std::uint64_t bytes, std::uint64_t to) { return (bytes + to - 1) / to * to; }

/// Returns the bytes that the GPU has given out. The caller holds State::mutex.
std::uint64_t given_out(int device) {
  State& all = state();
  std::uint64_t bytes = (all.is_active[device] ? kContextBytes : 0) + all.default_pools[device].reserved;
  for (const auto& [pool, own] : all.pools)
    if (pool->device == device) bytes += pool->reserved;
  for (const auto& [base, one] : all.allocations)
    if (one.device == device && (one.origin == Origin::kMalloc || one.origin == Origin::kVirtual)) bytes += one.bytes;
  return bytes;
}

/// The smallest part of a page-locked or registered range that `address` lies in, as [first, end).
std::optional<std::pair<std::uintptr_t, std::uintptr_t>> locked_range(std::uintptr_t address) {
  State& all = state();
  if (const auto found = find_allocation(address);
      found != all.allocations.end() && found->second.origin == Origin::kPinned)
    return std::pair(found->first, found->first + found->second.bytes);
  const auto after = all.registered.upper_bound(address);
  if (after == all.registered.begin()) return std::nullopt;
  const auto& [first, registration] = *std::prev(after);
  if (address >= first + registration.bytes) return std::nullopt;
  return std::pair(first, first + registration.bytes);
}

cudaError_t allocate(void** memory, std::size_t bytes, int device, Origin origin, Pool* pool) {
  if (origin != Origin::kPinned) {
    const std::lock_guard lock(state().mutex);
    if (bytes > kGpuBytes || given_out(device) + bytes > kGpuBytes) return keep(cudaErrorMemoryAllocation);
  }
  const MemoryKind kind = origin == Origin::kPinned ? MemoryKind::kPinned : MemoryKind::kDevice;
  const auto made = host_gpu(device).allocate(kind, std::max<std::size_t>(bytes, 1));
  if (!made) return keep(cudaErrorMemoryAllocation);
  *memory = *made;
  const std::lock_guard lock(state().mutex);
  state().allocations[number_of(*made)] = {bytes, device, origin, pool, *made};
  if (pool == nullptr) {
    ++host_cuda_counts().driver_allocations;
  } else if ((pool->used += bytes) > pool->reserved) {
    ++host_cuda_counts().driver_allocations;
    pool->reserved = rounded(pool->used, kPoolGrain);
  }
  return cudaSuccess;
}

/// Takes the allocation that begins at the address, if it is of the kind that the caller frees.
std::optional<Allocation> take(void* memory, bool is_pinned_memory) {
  const std::lock_guard lock(state().mutex);
  const auto found = state().allocations.find(number_of(memory));
  if (found == state().allocations.end() || found->second.memory == nullptr) return std::nullopt;
  if ((found->second.origin == Origin::kPinned) != is_pinned_memory) return std::nullopt;
  const Allocation taken = found->second;
  state().allocations.erase(found);
  if (taken.pool != nullptr) taken.pool->used -= taken.bytes;
  return taken;
}

cudaError_t free_and_wait(void* memory, bool is_pinned_memory) {
  use_device();
  if (memory == nullptr) return cudaSuccess;
  const std::optional<Allocation> taken = take(memory, is_pinned_memory);
  if (!taken) return keep(cudaErrorInvalidValue);
  ++host_cuda_counts().host_waits;
  ++host_cuda_counts().device_waits;
  for (int device = 0; device < kHostGpus; ++device)
    if (is_pinned_memory || device == taken->device) wait_for_all(device);
  host_gpu(taken->device).release_now(taken->memory);
  return cudaSuccess;
}

Pool* pool_of(cudaMemPool_t pool) { return reinterpret_cast<Pool*>(pool); }

}  // namespace

std::map<std::uintptr_t, Allocation>::iterator find_allocation(std::uintptr_t address) {
  auto& all = state().allocations;
  const auto after = all.upper_bound(address);
  if (after == all.begin()) return all.end();
  const auto found = std::prev(after);
  return address < found->first + std::max<std::size_t>(found->second.bytes, 1) ? found : all.end();
}

bool is_pinned(std::uintptr_t address, std::size_t bytes) {
  for (const std::uintptr_t end = address + bytes; address < end;) {
    const auto range = locked_range(address);
    if (!range) return false;
    address = range->second;
  }
  return true;
}

bool is_on_device(std::uintptr_t address) {
  const auto found = find_allocation(address);
  return found != state().allocations.end() && found->second.origin != Origin::kPinned;
}

void trim_pools(int device) {
  const std::lock_guard lock(state().mutex);
  const auto trim = [](Pool& pool) {
    if (pool.reserved > pool.threshold) pool.reserved = rounded(pool.used, kPoolGrain);
  };
  trim(state().default_pools[device]);
  for (const auto& [pool, own] : state().pools)
    if (pool->device == device) trim(*pool);
}

}  // namespace kvferry::host_cuda

using namespace kvferry;
using namespace kvferry::host_cuda;

extern "C" {

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  return allocate(memory, bytes, use_device(), Origin::kMalloc, nullptr);
}
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  return allocate(memory, bytes, use_device(), Origin::kPinned, nullptr);
}
cudaError_t cudaMallocHost(void** memory, std::size_t bytes) { return cudaHostAlloc(memory, bytes, 0); }
cudaError_t cudaFree(void* memory) { return free_and_wait(memory, false); }
cudaError_t cudaFreeHost(void* memory) { return free_and_wait(memory, true); }
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  const int device = use_device();
  const std::lock_guard lock(state().mutex);
  *total = kGpuBytes;
  *free = kGpuBytes - std::min(kGpuBytes, given_out(device));
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* memory, std::size_t bytes, unsigned flags) {
  use_device();
  const std::uintptr_t first = number_of(memory), end = first + bytes;
  if (memory == nullptr || bytes == 0) return keep(cudaErrorInvalidValue);
  const std::lock_guard lock(state().mutex);
  const auto after = state().registered.lower_bound(first);
  const auto next = state().allocations.lower_bound(first);
  const bool overlaps = locked_range(first) || (after != state().registered.end() && after->first < end) ||
                        (next != state().allocations.end() && next->first < end);
  if (overlaps) return keep(cudaErrorHostMemoryAlreadyRegistered);
  state().registered[first] = {bytes, flags | cudaHostRegisterMapped};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* memory) {
  use_device();
  const std::lock_guard lock(state().mutex);
  if (state().registered.erase(number_of(memory)) == 1) return cudaSuccess;
  return keep(locked_range(number_of(memory)) ? cudaErrorInvalidValue : cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaHostGetFlags(unsigned* flags, void* memory) {
  use_device();
  const std::lock_guard lock(state().mutex);
  const auto range = locked_range(number_of(memory));
  if (!range) return keep(cudaErrorInvalidValue);
  const auto found = state().registered.find(range->first);
  *flags = found == state().registered.end() ? cudaHostAllocMapped : found->second.flags;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory) {
  const std::lock_guard lock(state().mutex);
  *attributes = {};
  attributes->device = -1;
  attributes->type = cudaMemoryTypeUnregistered;
  const auto found = find_allocation(number_of(memory));
  if (found != state().allocations.end()) {
    attributes->device = found->second.device;
    attributes->type = found->second.origin == Origin::kPinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  } else if (locked_range(number_of(memory))) {
    attributes->device = 0;
    attributes->type = cudaMemoryTypeHost;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  if (device < 0 || device >= kHostGpus) return keep(cudaErrorInvalidDevice);
  state().default_pools[device].device = device;
  *pool = reinterpret_cast<cudaMemPool_t>(&state().default_pools[device]);
  return cudaSuccess;
}
cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* properties) {
  if (properties->location.type != cudaMemLocationTypeDevice || properties->location.id < 0 ||
      properties->location.id >= kHostGpus || properties->allocType != cudaMemAllocationTypePinned)
    return keep(cudaErrorInvalidValue);
  auto made = std::make_unique<Pool>();
  made->device = properties->location.id;
  *pool = reinterpret_cast<cudaMemPool_t>(made.get());
  const std::lock_guard lock(state().mutex);
  state().pools.emplace(made.get(), std::move(made));
  return cudaSuccess;
}
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  const std::lock_guard lock(state().mutex);
  return state().pools.erase(pool_of(pool)) == 1 ? cudaSuccess : keep(cudaErrorInvalidValue);
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  const std::lock_guard lock(state().mutex);
  if (attribute != cudaMemPoolAttrReleaseThreshold) return keep(cudaErrorInvalidValue);
  std::memcpy(&pool_of(pool)->threshold, value, sizeof(std::uint64_t));
  return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  const std::lock_guard lock(state().mutex);
  const Pool& asked = *pool_of(pool);
  const std::uint64_t* const found = attribute == cudaMemPoolAttrReleaseThreshold     ? &asked.threshold
                                     : attribute == cudaMemPoolAttrReservedMemCurrent ? &asked.reserved
                                     : attribute == cudaMemPoolAttrUsedMemCurrent     ? &asked.used
                                                                                      : nullptr;
  if (found == nullptr) return keep(cudaErrorInvalidValue);
  std::memcpy(value, found, sizeof(*found));
  return cudaSuccess;
}
cudaError_t cudaMallocFromPoolAsync(void** memory, std::size_t bytes, cudaMemPool_t pool, cudaStream_t) {
  use_device();
  return allocate(memory, bytes, pool_of(pool)->device, Origin::kPool, pool_of(pool));
}
cudaError_t cudaMallocAsync(void** memory, std::size_t bytes, cudaStream_t stream) {
  cudaMemPool_t pool = nullptr;
  cudaDeviceGetDefaultMemPool(&pool, resolve(stream).device);
  return cudaMallocFromPoolAsync(memory, bytes, pool, stream);
}
cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  use_device();
  const std::optional<Allocation> taken = take(memory, false);
  if (!taken) return keep(cudaErrorInvalidValue);
  host_gpu_enqueue(stream, [taken = *taken] {
    std::memset(taken.memory, 0x5a, 1);  // code that still reads the freed memory gets other bytes
    host_gpu(taken.device).release_now(taken.memory);
    return true;
  });
  return cudaSuccess;
}

}  // extern "C"
