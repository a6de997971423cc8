// IPC handles, the functions of the driver, and what is left over at the end.
#include <unistd.h>

#include <cstring>

#include "tests/gpu/gpu_environment.h"
#include "tests/gpu/host_cuda/simulated.h"

namespace kvferry {
namespace host_cuda {
namespace {

using Origin = Allocation::Origin;
CUresult primary_state(CUdevice device, unsigned* flags, int* active) {
  if (device < 0 || device >= kHostGpus) return CUDA_ERROR_INVALID_DEVICE;
  const std::lock_guard lock(state().mutex);
  *flags = 0;
  *active = state().is_active[device] ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult address_range(CUdeviceptr* base, std::size_t* bytes, CUdeviceptr address) {
  const std::lock_guard lock(state().mutex);
  const auto found = find_allocation(address);
  if (found == state().allocations.end() || found->second.origin == Origin::kPinned) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = found->first;
  if (bytes != nullptr) *bytes = found->second.bytes;
  return CUDA_SUCCESS;
}

CUresult pointer_attribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  const std::lock_guard lock(state().mutex);
  const auto found = find_allocation(address);
  if (found == state().allocations.end()) return CUDA_ERROR_INVALID_VALUE;
  const Allocation& one = found->second;
  unsigned answer = 0;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      answer = one.origin == Origin::kMalloc ? 1 : 0;
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      answer = static_cast<unsigned>(one.device);
      break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      answer = one.origin == Origin::kPinned ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  std::memcpy(value, &answer, sizeof(answer));
  return CUDA_SUCCESS;
}

/// What this simulation writes into an IPC handle.
struct Handle {
  std::uint64_t base = 0, process = 0;
};

}  // namespace

void* driver_function(const std::string& name) {
  static const std::map<std::string, void*> all = {
      {"cuDevicePrimaryCtxGetState", reinterpret_cast<void*>(&primary_state)},
      {"cuMemGetAddressRange", reinterpret_cast<void*>(&address_range)},
      {"cuPointerGetAttribute", reinterpret_cast<void*>(&pointer_attribute)},
  };
  const auto found = all.find(name);
  return found == all.end() ? virtual_memory_function(name) : found->second;
}

}  // namespace host_cuda

using namespace host_cuda;

ActsAsOtherProcess::ActsAsOtherProcess() { ++state().num_as_other_process; }
ActsAsOtherProcess::~ActsAsOtherProcess() { --state().num_as_other_process; }

int host_gpu_opened() {
  const std::lock_guard lock(state().mutex);
  int opened = 0;
  for (const auto& [base, count] : state().opened) opened += count;
  return opened;
}

std::vector<std::string> cuda_leaks() {
  std::vector<std::string> leaks;
  const auto say = [&](int device, std::uint64_t count, const char* what) {
    if (count > 0) leaks.push_back(fmt::format("cuda:{}: {} {}", device, count, what));
  };
  const std::lock_guard lock(state().mutex);
  for (int device = 0; device < kHostGpus; ++device) {
    say(device, static_cast<std::uint64_t>(state().num_streams[device]), "streams");
    say(device, static_cast<std::uint64_t>(state().num_events[device]), "events");
    std::map<Origin, std::uint64_t> bytes;
    for (const auto& [base, one] : state().allocations)
      if (one.device == device) bytes[one.origin] += std::max<std::uint64_t>(one.bytes, 1);
    say(device, bytes[Origin::kMalloc], "bytes of cudaMalloc()");
    say(device, bytes[Origin::kPool], "bytes of pools");
    say(device, bytes[Origin::kVirtual], "bytes of cuMemMap()");
    say(device, bytes[Origin::kPinned], "bytes of pinned memory");
  }
  say(0, state().registered.size(), "registered ranges of host memory");
  say(0, state().opened.size(), "open allocations of other processes");
  say(0, num_virtual_alive(), "handles of cuMemCreate() and reserved ranges of addresses");
  return leaks;
}

}  // namespace kvferry

using namespace kvferry;
using namespace kvferry::host_cuda;

extern "C" {

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* outcome) {
  *found = driver_function(name);
  if (outcome != nullptr)
    *outcome = *found != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// The memory of another process has the same address here as there, because the other process is this one.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  use_device();
  const std::lock_guard lock(state().mutex);
  const auto found = find_allocation(number_of(memory));
  if (found == state().allocations.end() || found->second.origin != Origin::kMalloc) return keep(cudaErrorInvalidValue);
  const Handle own{found->first, static_cast<std::uint64_t>(::getpid())};
  *handle = {};
  std::memcpy(handle->reserved, &own, sizeof(own));
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned) {
  const int device = use_device();
  Handle read;
  std::memcpy(&read, handle.reserved, sizeof(read));
  const std::lock_guard lock(state().mutex);
  if (state().num_as_other_process == 0) return keep(cudaErrorDeviceUninitialized);
  const auto found = state().allocations.find(read.base);
  if (found == state().allocations.end()) return keep(cudaErrorInvalidValue);
  int can_access = 1;
  if (found->second.device != device) cudaDeviceCanAccessPeer(&can_access, device, found->second.device);
  if (can_access == 0) return keep(cudaErrorMapBufferObjectFailed);
  *memory = reinterpret_cast<void*>(read.base);
  ++state().opened[read.base];
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void* memory) {
  use_device();
  const std::lock_guard lock(state().mutex);
  const auto found = state().opened.find(number_of(memory));
  if (found == state().opened.end()) return keep(cudaErrorInvalidValue);
  if (--found->second == 0) state().opened.erase(found);
  return cudaSuccess;
}

}  // extern "C"
