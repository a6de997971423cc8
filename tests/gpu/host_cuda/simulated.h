// CUDA's runtime, and the part of its driver that kvferry asks for, implemented on simulated GPUs. So programs that are
// built for CUDA run without a GPU, with work that runs as late and in as unusual an order as streams and events allow.
// Tests link this folder in place of libcudart. tests/gpu/cuda_runtime_test.cpp compares it with CUDA itself.
//
// Where CUDA's behaviour depends on the driver, this one is strict: each call but a question makes the current device's
// primary context. This header has the state that the sources share.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "tests/gpu/host_cuda/host_cuda.h"

namespace kvferry::host_cuda {

constexpr std::uint64_t kGpuBytes = std::uint64_t{16} << 30, kContextBytes = std::uint64_t{512} << 20;

/// A memory pool. cudaMemPool_t points to one.
struct Pool {
  int device = 0;
  std::uint64_t threshold = 0, reserved = 0, used = 0;
};

struct Allocation {
  enum class Origin : std::uint8_t { kMalloc, kPool, kVirtual, kPinned };
  std::size_t bytes = 0;
  int device = 0;
  Origin origin = Origin::kMalloc;
  Pool* pool = nullptr;
  std::byte* memory = nullptr;  // the simulated device's memory; null if it belongs to something else
};

struct Registration {
  std::size_t bytes = 0;
  unsigned flags = 0;
};

/// cudaStream_t points to one.
struct Stream {
  int device = 0;
  DeviceStream inner = nullptr;
};

/// cudaEvent_t points to one. An event that was recorded again is another `reached`.
struct Event {
  int device = 0;
  std::shared_ptr<std::atomic<bool>> reached;  // null: never recorded
};

struct State {
  std::mutex mutex;
  bool is_active[kHostGpus] = {};  // primary contexts
  std::map<int, int> attributes;
  std::map<std::uintptr_t, Allocation> allocations;
  std::map<std::uintptr_t, Registration> registered;
  std::map<std::uintptr_t, int> opened;  // how often each allocation of another process is open
  std::set<std::pair<int, int>> peers;   // GPU and the peer whose memory it may access
  Pool default_pools[kHostGpus];
  std::map<Pool*, std::unique_ptr<Pool>> pools;
  int num_streams[kHostGpus] = {}, num_events[kHostGpus] = {};
  int num_as_other_process = 0;
};
State& state();

/// Returns the code. An error is kept as the thread's last error, as each function of the runtime does.
cudaError_t keep(cudaError_t code);
/// Returns the calling thread's current device without making its context.
int current_device();
/// Returns the calling thread's current device after making its primary context.
int use_device();
/// Returns the allocation that contains the address. The caller holds State::mutex.
std::map<std::uintptr_t, Allocation>::iterator find_allocation(std::uintptr_t address);
/// Returns true if the whole range is page-locked host memory. The caller holds State::mutex.
bool is_pinned(std::uintptr_t address, std::size_t bytes);
/// Returns true if the address is in memory of a GPU. The caller holds State::mutex.
bool is_on_device(std::uintptr_t address);
/// Returns the stream; for the default stream that of the current device.
Stream resolve(cudaStream_t stream);
/// Blocks until all work of the GPU has ended.
void wait_for_all(int device);
/// Lets the pools of the GPU return what exceeds their threshold, as each synchronisation does.
void trim_pools(int device);
/// Looks up a function of the driver; null: there is none with this name.
void* driver_function(const std::string& name);
void* virtual_memory_function(const std::string& name);
/// Returns the number of handles and ranges of addresses that were not given back. The caller holds State::mutex.
std::size_t num_virtual_alive();
/// Launches a kernel: adds its work to the stream, or fails if the stream belongs to another device than the current.
void launch(cudaStream_t stream, std::function<bool()> work);

inline std::uintptr_t number_of(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }

}  // namespace kvferry::host_cuda
