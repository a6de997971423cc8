#include "kernels/cuda/cuda_device.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "kernels/cuda/cuda_checksums.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/shared_allocations.h"
#include "transport/base/log.h"

namespace kvferry {
namespace {

// Minimum size of a range that a copy engine copies. A copy engine takes microseconds to start but leaves the GPU's
// processors to the model. One kernel launch copies all smaller ranges.
constexpr std::uint64_t kCopyEngineBytes = 256 << 10;

class CudaDevice final : public Device {
 public:
  CudaDevice(int ordinal, std::string name, bool flushes)
      : ordinal_(ordinal), name_(std::move(name)), flushes_(flushes) {}

  std::string describe() const override { return name_; }

  Result<std::byte*> allocate(MemoryKind kind, std::uint64_t bytes) override {
    const CurrentDevice current(ordinal_);
    void* memory = nullptr;
    const bool is_device = kind == MemoryKind::kDevice;
    const cudaError_t code =
        is_device ? cudaMalloc(&memory, bytes) : cudaHostAlloc(&memory, bytes, cudaHostAllocPortable);
    KVFERRY_TRY(cuda_result(code, is_device ? "allocating GPU memory" : "allocating pinned host memory"));
    return static_cast<std::byte*>(memory);
  }
  void release(MemoryKind kind, std::byte* base) override {
    const CurrentDevice current(ordinal_);
    complain(kind == MemoryKind::kDevice ? cudaFree(base) : cudaFreeHost(base), "freeing memory");
  }
  Result<std::uint64_t> free_bytes() override {
    const CurrentDevice current(ordinal_);
    std::size_t free = 0, total = 0;
    KVFERRY_TRY(cuda_result(cudaMemGetInfo(&free, &total), "asking how much memory is free"));
    return std::uint64_t{free};
  }
  Result<void> pin(std::span<std::byte> memory) override {
    const CurrentDevice current(ordinal_);
    const std::lock_guard lock(mutex_);
    if (const auto found = pins_.find(memory.data()); found != pins_.end() && found->second.bytes == memory.size()) {
      ++found->second.count;
      return {};
    }
    Result<void> ok =
        cuda_result(cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterPortable | cudaHostRegisterMapped),
                    "pinning host memory");
    if (ok) pins_[memory.data()] = {memory.size(), 1};
    return ok;
  }
  void unpin(std::span<std::byte> memory) override {
    const CurrentDevice current(ordinal_);
    const std::lock_guard lock(mutex_);
    const auto found = pins_.find(memory.data());
    if (found == pins_.end() || --found->second.count > 0) return;
    pins_.erase(found);
    complain(cudaHostUnregister(memory.data()), "unpinning host memory");
  }

  Result<DeviceStream> make_stream() override {
    const CurrentDevice current(ordinal_);
    cudaStream_t stream = nullptr;
    KVFERRY_TRY(cuda_result(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream"));
    return DeviceStream{stream};
  }
  void drop_stream(DeviceStream stream) override {
    const CurrentDevice current(ordinal_);
    complain(cudaStreamDestroy(stream_of(stream)), "destroying a stream");
  }

  Result<EventHandle> record(DeviceStream stream) override {
    const CurrentDevice current(ordinal_);
    Event event = KVFERRY_TRY(make_event());
    KVFERRY_TRY(cuda_result(cudaEventRecord(event.get(), stream_of(stream)), "recording an event"));
    return EventHandle{event.release()};
  }
  void drop_event(EventHandle event) override {
    const CurrentDevice current(ordinal_);
    complain(cudaEventDestroy(event_of(event)), "destroying an event");
  }
  Result<bool> is_reached(EventHandle event) override {
    const CurrentDevice current(ordinal_);
    return is_event_reached(event_of(event), "querying an event");
  }
  Result<void> wait(EventHandle event) override {
    const CurrentDevice current(ordinal_);
    return cuda_result(cudaEventSynchronize(event_of(event)), "waiting for an event");
  }
  Result<void> wait_on(DeviceStream stream, EventHandle event) override {
    const CurrentDevice current(ordinal_);
    return cuda_result(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0), "ordering a stream after an event");
  }

  Result<void> copy(std::span<const DeviceCopy> copies, DeviceStream stream) override {
    const CurrentDevice current(ordinal_);
    KVFERRY_TRY(flush_arrivals());
    std::vector<cuda::RangeJob> small;
    for (const DeviceCopy& copy : copies) {
      if (copy.bytes == 0) continue;
      if (copy.bytes < kCopyEngineBytes && copies.size() > 1) {
        small.push_back({copy.to, copy.from, copy.bytes});
        continue;
      }
      const cudaError_t code = cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDefault, stream_of(stream));
      KVFERRY_TRY(cuda_result(code, "copying memory"));
    }
    for (std::size_t first = 0; first < small.size(); first += cuda::kJobsMax) {
      const std::size_t count = std::min<std::size_t>(small.size() - first, cuda::kJobsMax);
      KVFERRY_TRY(copy_small(std::span(small).subspan(first, count), stream_of(stream)));
    }
    return {};
  }

  Result<std::string> export_memory(std::span<const std::byte> memory) override {
    const CurrentDevice current(ordinal_);
    return shared_.export_memory(memory);
  }
  Result<std::byte*> open_memory(const std::string& exported, std::uint64_t bytes) override {
    const CurrentDevice current(ordinal_);
    return shared_.open(exported, bytes);
  }
  void close_memory(std::byte* base) override {
    const CurrentDevice current(ordinal_);
    shared_.close(base);
  }

  Result<std::unique_ptr<Checksums>> checksums(std::span<const std::span<const std::byte>> ranges,
                                               DeviceStream stream) override {
    const CurrentDevice current(ordinal_);
    KVFERRY_TRY(flush_arrivals());
    return start_cuda_checksums(pinned_, ordinal_, ranges, stream_of(stream));
  }

 private:
  static cudaStream_t stream_of(DeviceStream stream) { return static_cast<cudaStream_t>(stream); }
  static cudaEvent_t event_of(EventHandle event) { return static_cast<cudaEvent_t>(event); }
  static void complain(cudaError_t code, const char* what) {
    if (const Result<void> ok = cuda_result(code, what); !ok) log().error("GPU: {}", ok.error().what);
  }

  /// Makes what a network card wrote visible to work that is launched afterwards.
  Result<void> flush_arrivals() const {
    if (!flushes_) return {};
    return cuda_result(cudaDeviceFlushGPUDirectRDMAWrites(cudaFlushGPUDirectRDMAWritesTargetCurrentDevice,
                                                          cudaFlushGPUDirectRDMAWritesToOwner),
                       "flushing GPUDirect writes");
  }

  Result<void> copy_small(std::span<const cuda::RangeJob> jobs, cudaStream_t stream) {
    const std::size_t bytes = jobs.size_bytes();
    StreamBuffer on_device;
    KVFERRY_TRY(on_device.allocate(bytes, stream));
    // The source is pinned, because a copy from pageable memory may wait for the whole stream.
    PinnedBuffer host = KVFERRY_TRY(pinned_.take(bytes));
    std::memcpy(host.data(), jobs.data(), bytes);
    KVFERRY_TRY(cuda_result(cudaMemcpyAsync(on_device.data(), host.data(), bytes, cudaMemcpyHostToDevice, stream),
                            "sending copy jobs to the GPU"));
    KVFERRY_TRY(keep_until_sent(std::move(host), stream));
    std::uint64_t bytes_max = 0;
    for (const cuda::RangeJob& job : jobs) bytes_max = std::max(bytes_max, job.num_bytes);
    return cuda_result(cuda::launch_ranges(reinterpret_cast<const cuda::RangeJob*>(on_device.data()),
                                           static_cast<std::uint32_t>(jobs.size()), bytes_max, stream),
                       "launching copies");
  }

  /// Holds the buffer until the device has read it, and returns buffers that it has read to the pool.
  Result<void> keep_until_sent(PinnedBuffer host, cudaStream_t stream) {
    Event event = KVFERRY_TRY(make_event());
    KVFERRY_TRY(cuda_result(cudaEventRecord(event.get(), stream), "recording an event"));
    const std::lock_guard lock(mutex_);
    unsent_.emplace_back(std::move(event), std::move(host));
    while (!unsent_.empty() && cudaEventQuery(unsent_.front().first.get()) == cudaSuccess) {
      pinned_.give_back(std::move(unsent_.front().second));
      unsent_.pop_front();
    }
    return {};
  }

  const int ordinal_;
  const std::string name_;
  const bool flushes_;
  PinnedPool pinned_;
  SharedAllocations shared_;
  struct Pin {
    std::size_t bytes = 0;
    std::uint32_t count = 0;
  };
  std::mutex mutex_;
  std::map<std::byte*, Pin> pins_;
  std::deque<std::pair<Event, PinnedBuffer>> unsent_;  // host buffers that the device may still read, oldest first
};

}  // namespace

Result<std::shared_ptr<Device>> make_cuda_device(int ordinal) {
  int num_devices = 0;
  KVFERRY_TRY(cuda_result(cudaGetDeviceCount(&num_devices), "counting GPUs"));
  if (ordinal < 0 || ordinal >= num_devices)
    return Error{ErrorCode::kUnavailable,
                 fmt::format("GPU {} does not exist: CUDA has {} GPUs, numbered from 0", ordinal, num_devices)};
  cudaDeviceProp properties{};
  KVFERRY_TRY(cuda_result(cudaGetDeviceProperties(&properties, ordinal), "querying the GPU's properties"));
  int is_supported = 0, ordering = cudaGPUDirectRDMAWritesOrderingNone;
  cudaDeviceGetAttribute(&is_supported, cudaDevAttrGPUDirectRDMASupported, ordinal);
  cudaDeviceGetAttribute(&ordering, cudaDevAttrGPUDirectRDMAWritesOrdering, ordinal);
  const bool flushes = is_supported != 0 && ordering == cudaGPUDirectRDMAWritesOrderingNone;
  return std::shared_ptr<Device>(
      std::make_shared<CudaDevice>(ordinal, fmt::format("{} (cuda:{})", properties.name, ordinal), flushes));
}

Result<Gpu> open_gpu(int ordinal) {
  std::shared_ptr<Device> device = KVFERRY_TRY(make_cuda_device(ordinal));
  return Gpu{std::move(device), [ordinal](KvLayout layout, ChunkFormat format) {
               return make_cuda_packer(ordinal, std::move(layout), std::move(format));
             }};
}

}  // namespace kvferry
