// Devices, primary contexts, the thread's current device and last error.
#include <cstring>
#include <utility>

#include "tests/gpu/host_cuda/simulated.h"

namespace kvferry {
namespace host_cuda {
namespace {

thread_local int current = 0;
thread_local cudaError_t last_error = cudaSuccess;

void activate(int device) {
  const std::lock_guard lock(state().mutex);
  if (!std::exchange(state().is_active[device], true)) ++host_cuda_counts().contexts[device];
}

/// Attributes that an H200 with driver 580 has.
int attribute_of(cudaDeviceAttr attribute) {
  const std::lock_guard lock(state().mutex);
  if (const auto set = state().attributes.find(attribute); set != state().attributes.end()) return set->second;
  return attribute == cudaDevAttrGPUDirectRDMAWritesOrdering ? cudaGPUDirectRDMAWritesOrderingOwner
                                                             : 1;  // the others that are asked for are yes or no
}

}  // namespace

State& state() {
  static State all;
  return all;
}

cudaError_t keep(cudaError_t code) {
  if (code != cudaSuccess && code != cudaErrorNotReady) last_error = code;
  return code;
}

int current_device() { return current; }

int use_device() {
  activate(current);
  return current;
}

}  // namespace host_cuda

using namespace host_cuda;

HostCudaCounts& host_cuda_counts() {
  static HostCudaCounts counts;
  return counts;
}

void host_cuda_set_attribute(cudaDeviceAttr attribute, int value) {
  const std::lock_guard lock(state().mutex);
  state().attributes[attribute] = value;
}

}  // namespace kvferry

using namespace kvferry;
using namespace kvferry::host_cuda;

namespace {
bool exists(int device) { return device >= 0 && device < kHostGpus; }
}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) { return *count = kHostGpus, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = current, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (!exists(device)) return keep(cudaErrorInvalidDevice);
  current = device;
  use_device();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (!exists(device)) return keep(cudaErrorInvalidDevice);
  *properties = {};
  std::strcpy(properties->name, "simulated GPU");
  properties->totalGlobalMem = kGpuBytes;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (!exists(device)) return keep(cudaErrorInvalidDevice);
  *value = attribute_of(attribute);
  return cudaSuccess;
}
cudaError_t cudaDeviceFlushGPUDirectRDMAWrites(cudaFlushGPUDirectRDMAWritesTarget, cudaFlushGPUDirectRDMAWritesScope) {
  use_device();
  if ((attribute_of(cudaDevAttrGPUDirectRDMAFlushWritesOptions) & cudaFlushGPUDirectRDMAWritesOptionHost) == 0)
    return keep(cudaErrorNotSupported);
  ++host_cuda_counts().flushes;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorString(cudaError_t code) { return code == cudaSuccess ? "no error" : "simulated error"; }
const char* cudaGetErrorName(cudaError_t code) {
  switch (code) {
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorHostMemoryAlreadyRegistered:
      return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered:
      return "cudaErrorHostMemoryNotRegistered";
    default:
      return "simulated";
  }
}

cudaError_t cudaDeviceCanAccessPeer(int* can_access, int device, int peer) {
  if (!exists(device) || !exists(peer)) return keep(cudaErrorInvalidDevice);
  *can_access = device != peer && device != kHostGpus - 1 && peer != kHostGpus - 1 ? 1 : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  int can_access = 0;
  if (flags != 0) return keep(cudaErrorInvalidValue);
  if (const cudaError_t asked = cudaDeviceCanAccessPeer(&can_access, use_device(), peer); asked != cudaSuccess)
    return asked;
  if (peer == current) return keep(cudaErrorInvalidDevice);
  if (can_access == 0) return keep(cudaErrorPeerAccessUnsupported);
  const std::lock_guard lock(state().mutex);
  return state().peers.emplace(current, peer).second ? cudaSuccess : keep(cudaErrorPeerAccessAlreadyEnabled);
}
cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  if (!exists(peer)) return keep(cudaErrorInvalidDevice);
  const int device = use_device();
  const std::lock_guard lock(state().mutex);
  return state().peers.erase({device, peer}) == 1 ? cudaSuccess : keep(cudaErrorPeerAccessNotEnabled);
}

}  // extern "C"
