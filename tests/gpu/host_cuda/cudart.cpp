// The part of CUDA's runtime that kvferry calls, implemented on the simulated GPU. So programs that are built for CUDA
// run without a GPU, with work that runs as late and in as unusual an order as streams and events allow. Tests link
// this file in place of libcudart.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

#include "tests/gpu/host_cuda/host_cuda.h"

namespace {

using kvferry::Device;
using kvferry::DeviceCopy;
using kvferry::MemoryKind;

/// An event of CUDA, which may be recorded several times.
struct HostEvent {
  Device::EventHandle recorded = nullptr;
};

kvferry::SimDevice& gpu() { return kvferry::host_gpu(); }
HostEvent& of(cudaEvent_t event) { return *reinterpret_cast<HostEvent*>(event); }

template <class T>
cudaError_t outcome(const kvferry::Result<T>& result) {
  return result ? cudaSuccess : cudaErrorUnknown;
}

/// The allocations that cuMemGetAddressRange() knows.
struct Allocations {
  std::mutex mutex;
  std::map<std::uintptr_t, std::size_t> bytes;
  std::map<std::uintptr_t, int> num_opened;  // how often each was opened by the handle of another process
};
Allocations& allocations() {
  static Allocations all;
  return all;
}

cudaError_t allocate(MemoryKind kind, void** memory, std::size_t bytes) {
  const auto made = gpu().allocate(kind, bytes);
  if (!made) return cudaErrorMemoryAllocation;
  *memory = *made;
  const std::lock_guard lock(allocations().mutex);
  allocations().bytes[reinterpret_cast<std::uintptr_t>(*made)] = bytes;
  return cudaSuccess;
}

void drop(void* memory) {
  const std::lock_guard lock(allocations().mutex);
  allocations().bytes.erase(reinterpret_cast<std::uintptr_t>(memory));
}

CUresult address_range(CUdeviceptr* base, std::size_t* bytes, CUdeviceptr address) {
  const std::lock_guard lock(allocations().mutex);
  const auto after = allocations().bytes.upper_bound(address);
  if (after == allocations().bytes.begin()) return CUDA_ERROR_NOT_FOUND;
  const auto found = std::prev(after);
  if (address >= found->first + found->second) return CUDA_ERROR_NOT_FOUND;
  *base = found->first;
  *bytes = found->second;
  return CUDA_SUCCESS;
}

}  // namespace

namespace kvferry {

SimDevice& host_gpu() {
  static SimDevice device(7, SimDevice::Drive::kInBackground);
  return device;
}

int host_gpu_opened() {
  const std::lock_guard lock(allocations().mutex);
  int opened = 0;
  for (const auto& [base, count] : allocations().num_opened) opened += count;
  return opened;
}

}  // namespace kvferry

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "simulated GPU");
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 1, cudaSuccess; }
cudaError_t cudaDeviceFlushGPUDirectRDMAWrites(cudaFlushGPUDirectRDMAWritesTarget, cudaFlushGPUDirectRDMAWritesScope) {
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t code) { return code == cudaSuccess ? "no error" : "simulated error"; }
const char* cudaGetErrorName(cudaError_t) { return "simulated"; }

cudaError_t cudaMalloc(void** memory, std::size_t bytes) { return allocate(MemoryKind::kDevice, memory, bytes); }
cudaError_t cudaMallocHost(void** memory, std::size_t bytes) { return allocate(MemoryKind::kPinned, memory, bytes); }
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) { return cudaMallocHost(memory, bytes); }
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = std::size_t{14} << 30;
  *total = std::size_t{141} << 30;
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  if (memory == nullptr) return cudaSuccess;
  drop(memory);
  gpu().release(MemoryKind::kDevice, static_cast<std::byte*>(memory));
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }
cudaError_t cudaHostRegister(void* memory, std::size_t bytes, unsigned) {
  return outcome(gpu().pin({static_cast<std::byte*>(memory), bytes}));
}
cudaError_t cudaHostUnregister(void* memory) {
  gpu().unpin({static_cast<std::byte*>(memory), 1});
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** memory, std::size_t bytes, cudaStream_t) { return cudaMalloc(memory, bytes); }
cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  gpu().enqueue(stream, [memory] {
    drop(memory);
    std::memset(memory, 0x5a, 1);  // code that still reads the freed memory gets other bytes
    gpu().release_now(static_cast<std::byte*>(memory));
    return true;
  });
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult*) {
  *found = std::strcmp(name, "cuMemGetAddressRange") == 0 ? reinterpret_cast<void*>(&address_range) : nullptr;
  return cudaSuccess;
}
// The memory of another process has the same address here as there, because the other process is this one.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  *handle = {};
  std::memcpy(handle->reserved, &memory, sizeof(memory));
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned) {
  std::memcpy(memory, handle.reserved, sizeof(*memory));
  const std::lock_guard lock(allocations().mutex);
  ++allocations().num_opened[reinterpret_cast<std::uintptr_t>(*memory)];
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void* memory) {
  const std::lock_guard lock(allocations().mutex);
  const auto found = allocations().num_opened.find(reinterpret_cast<std::uintptr_t>(memory));
  if (found == allocations().num_opened.end()) return cudaErrorInvalidValue;
  if (--found->second == 0) allocations().num_opened.erase(found);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  const auto made = gpu().make_stream();
  if (made) *stream = static_cast<cudaStream_t>(*made);
  return outcome(made);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return gpu().drop_stream(stream), cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return of(event).recorded == nullptr ? cudaSuccess : outcome(gpu().wait_on(stream, of(event).recorded));
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const auto mark = kvferry::DeviceEvent::record(gpu(), stream);
  return mark ? outcome(mark->wait()) : cudaErrorUnknown;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new HostEvent);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  if (of(event).recorded != nullptr) gpu().drop_event(of(event).recorded);
  delete &of(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const auto recorded = gpu().record(stream);
  if (!recorded) return cudaErrorUnknown;
  if (of(event).recorded != nullptr) gpu().drop_event(of(event).recorded);
  of(event).recorded = *recorded;
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (of(event).recorded == nullptr) return cudaSuccess;
  const auto is_reached = gpu().is_reached(of(event).recorded);
  if (!is_reached) return cudaErrorUnknown;
  return *is_reached ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return of(event).recorded == nullptr ? cudaSuccess : outcome(gpu().wait(of(event).recorded));
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  const DeviceCopy copy[] = {{static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes}};
  return outcome(gpu().copy(copy, stream));
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  const cudaError_t code = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return code == cudaSuccess ? cudaStreamSynchronize(nullptr) : code;
}

}  // extern "C"
