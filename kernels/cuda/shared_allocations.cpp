#include "kernels/cuda/shared_allocations.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <random>
#include <utility>

#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/driver_api.h"
#include "transport/base/log.h"
#include "transport/base/wire.h"

namespace kvferry {
namespace {

struct Exported {
  std::uint64_t process = 0;  // random number for the owner's process; pids of different containers may be equal
  std::uint64_t address = 0;  // address in the owner's process
  std::string handle;         // CUDA's handle of the allocation
  std::uint64_t allocation_bytes = 0;
  std::uint64_t offset = 0;
  KVFERRY_FIELDS(process, address, handle, allocation_bytes, offset);
};

std::uint64_t this_process() {
  static const std::uint64_t number = (std::uint64_t{std::random_device()()} << 32) | std::random_device()();
  return number;
}

struct Allocation {
  std::uint64_t base = 0;
  std::uint64_t bytes = 0;
};

/// Returns the allocation that contains `memory`. Asks the driver, since CUDA's runtime has no function for this.
Result<Allocation> allocation_of(const std::byte* memory) {
  using AddressRange = CUresult (*)(CUdeviceptr*, std::size_t*, CUdeviceptr);
  void* const found = KVFERRY_TRY(driver_function("cuMemGetAddressRange", 3020));
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  const CUresult code = reinterpret_cast<AddressRange>(found)(&base, &bytes, reinterpret_cast<std::uintptr_t>(memory));
  if (code != CUDA_SUCCESS)
    return Error{ErrorCode::kUnavailable,
                 fmt::format("the CUDA driver finds no GPU memory at {} (its error {})", fmt::ptr(memory), int{code})};
  return Allocation{base, bytes};
}

/// Returns an error if CUDA has no IPC handle for the memory. CUDA's own error would only say "invalid argument".
Result<void> check_has_handle(const std::byte* memory) {
  using GetAttribute = CUresult (*)(void*, CUpointer_attribute, CUdeviceptr);
  const Result<void*> found = driver_function("cuPointerGetAttribute", 4000);
  if (!found) return {};  // without cuPointerGetAttribute(), cudaIpcGetMemHandle() decides
  int has_handle = 1;
  const CUresult code = reinterpret_cast<GetAttribute>(*found)(
      &has_handle, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, reinterpret_cast<std::uintptr_t>(memory));
  if (code != CUDA_SUCCESS || has_handle != 0) return {};
  return Error{ErrorCode::kUnavailable,
               fmt::format("the GPU memory at {} is not from cudaMalloc() but from a memory pool or cuMemCreate() "
                           "(PyTorch's expandable_segments, vLLM's sleep mode), for which CUDA makes no IPC handle",
                           fmt::ptr(memory))};
}

}  // namespace

Result<std::string> SharedAllocations::export_memory(std::span<const std::byte> memory) {
  const Allocation allocation = KVFERRY_TRY(allocation_of(memory.data()));
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  const std::uint64_t offset = address - allocation.base;
  if (offset + memory.size() > allocation.bytes)
    return Error{ErrorCode::kUnavailable, fmt::format("{} bytes at {} are not within one allocation of GPU memory",
                                                      memory.size(), fmt::ptr(memory.data()))};
  KVFERRY_TRY(check_has_handle(memory.data()));
  cudaIpcMemHandle_t handle;
  KVFERRY_TRY(cuda_result(cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(allocation.base)),
                          "cannot export GPU memory to other processes"));
  const std::lock_guard lock(mutex_);
  std::uint64_t& bytes = exported_[address];
  bytes = std::max<std::uint64_t>(bytes, memory.size());
  return encode(Exported{this_process(), address, std::string(handle.reserved, sizeof(handle.reserved)),
                         allocation.bytes, offset});
}

Result<std::byte*> SharedAllocations::own_memory(std::uint64_t address, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = exported_.find(address);
  if (found == exported_.end() || found->second < bytes)
    return Error{
        ErrorCode::kCorrupt,
        fmt::format("a handle of GPU memory names {} bytes at address {:#x} of this process, which were not exported",
                    bytes, address)};
  return reinterpret_cast<std::byte*>(address);
}

static Error claims_too_much(std::uint64_t claimed, std::uint64_t actual) {
  return {ErrorCode::kCorrupt,
          fmt::format("another process's handle of GPU memory claims an allocation of {} bytes, but it has {}", claimed,
                      actual)};
}

Result<std::byte*> SharedAllocations::open(const std::string& exported, std::uint64_t bytes) {
  Exported parsed = KVFERRY_TRY(decode<Exported>(exported, "handle of GPU memory"));
  if (parsed.process == this_process()) return own_memory(parsed.address, bytes);
  cudaIpcMemHandle_t handle;
  if (parsed.handle.size() != sizeof(handle.reserved) || parsed.offset > parsed.allocation_bytes ||
      bytes > parsed.allocation_bytes - parsed.offset)
    return Error{
        ErrorCode::kCorrupt,
        fmt::format("malformed handle of GPU memory: {} bytes at offset {} of an allocation of {} bytes, with a "
                    "CUDA handle of {} bytes; allowed: bytes that lie within the allocation, and a CUDA handle of {} "
                    "bytes",
                    bytes, parsed.offset, parsed.allocation_bytes, parsed.handle.size(), sizeof(handle.reserved))};
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(opened_.begin(), opened_.end(),
                                  [&](const auto& entry) { return entry.second.handle == parsed.handle; });
  if (found != opened_.end()) {
    if (parsed.allocation_bytes > found->second.bytes)
      return claims_too_much(parsed.allocation_bytes, found->second.bytes);
    ++found->second.num_users;
    return found->first + parsed.offset;
  }
  std::memcpy(handle.reserved, parsed.handle.data(), sizeof(handle.reserved));
  void* base = nullptr;
  KVFERRY_TRY(cuda_result(cudaIpcOpenMemHandle(&base, handle, cudaIpcMemLazyEnablePeerAccess),
                          "cannot open another process's GPU memory"));
  const Result<Allocation> truth = allocation_of(static_cast<std::byte*>(base));
  if (!truth || truth->bytes < parsed.allocation_bytes) {
    cudaIpcCloseMemHandle(base);
    return truth ? claims_too_much(parsed.allocation_bytes, truth->bytes) : truth.error();
  }
  auto& opened = opened_[static_cast<std::byte*>(base)];
  // If CUDA returned an address that is mapped already, this opening is undone, since close() closes a mapping once.
  if (opened.num_users > 0) cudaIpcCloseMemHandle(base);
  ++opened.num_users;
  opened.handle = std::move(parsed.handle);
  opened.bytes = parsed.allocation_bytes;
  return static_cast<std::byte*>(base) + parsed.offset;
}

void SharedAllocations::close(std::byte* memory) {
  const std::lock_guard lock(mutex_);
  auto found = opened_.upper_bound(memory);
  if (found == opened_.begin()) return;  // the memory belongs to this process, and open() has not mapped it
  found = std::prev(found);
  if (memory >= found->first + found->second.bytes || --found->second.num_users > 0) return;
  if (const Result<void> ok =
          cuda_result(cudaIpcCloseMemHandle(found->first), "cannot close another process's GPU memory");
      !ok)
    log().error("GPU: {}", ok.error().what);
  opened_.erase(found);
}

}  // namespace kvferry
