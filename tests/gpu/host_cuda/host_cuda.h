// CUDA without a GPU: what tests see of it and what they set. See simulated.h.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <functional>

#include "tests/device/sim_device.h"

namespace kvferry {

/// Number of simulated GPUs. All pairs but one with the last GPU can access each other's memory.
constexpr int kHostGpus = 3;

/// Returns the device that does the work of the GPU with this number.
SimDevice& host_gpu(int ordinal = 0);
/// Adds a test's own work to a stream, see SimDevice::enqueue().
void host_gpu_enqueue(cudaStream_t stream, std::function<bool()> work);

/// What the process has asked of CUDA so far.
struct HostCudaCounts {
  std::atomic<std::uint64_t> contexts[kHostGpus] = {};  // [GPU] primary contexts made
  std::atomic<std::uint64_t> host_waits{0};             // calls that make the host wait for work of a GPU
  std::atomic<std::uint64_t> device_waits{0};           // those of them that wait for all work of a GPU: frees
  std::atomic<std::uint64_t> driver_allocations{0};     // allocations that had to ask the driver for memory
  std::atomic<std::uint64_t> flushes{0};                // cudaDeviceFlushGPUDirectRDMAWrites()
};
HostCudaCounts& host_cuda_counts();

/// Sets an attribute of all GPUs. An attribute that was never set is that of an H200.
void host_cuda_set_attribute(cudaDeviceAttr attribute, int value);

/// While an object lives, this process opens its own IPC handles as if other processes had made them.
class ActsAsOtherProcess {
 public:
  ActsAsOtherProcess();
  ~ActsAsOtherProcess();
};
/// Returns how often memory of other processes was opened and not closed again.
int host_gpu_opened();

}  // namespace kvferry
