#include "kernels/cuda/cuda_device.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <deque>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "kernels/cuda/cuda_checksums.h"
#include "kernels/cuda/cuda_ids.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/current_device.h"
#include "kernels/cuda/gpu_support.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pinned_pool.h"
#include "kernels/cuda/shared_allocations.h"
#include "transport/base/log.h"

namespace kvferry {
namespace {

// Minimum size of a range that a copy engine copies if a call copies several ranges. A copy engine takes microseconds
// to start but leaves the GPU's multiprocessors to the model. Smaller ranges are copied together by a kernel.
constexpr std::uint64_t kCopyEngineBytes = 256 << 10;

class CudaDevice final : public Device {
 public:
  CudaDevice(int ordinal, const cudaDeviceProp& properties, bool flushes)
      : ordinal_(ordinal),
        name_(fmt::format("{} (cuda:{})", properties.name, ordinal)),
        pci_bus_id_(cuda_pci_bus_id(properties)),
        uuid_(cuda_uuid(properties)),
        flushes_(flushes) {}

  ~CudaDevice() override {
    const CurrentDevice current(ordinal_);
    for (auto& [event, buffer] : unread_) {
      cudaEventSynchronize(event.get());
      pinned_.give_back(std::move(buffer));
    }
    unread_.clear();
    pinned_.clear();
  }

  std::string describe() const override { return name_; }
  std::string pci_bus_id() const override { return pci_bus_id_; }
  std::string uuid() const override { return uuid_; }
  Result<void> bind_thread() override {
    return cuda_result(cudaSetDevice(ordinal_), fmt::format("cannot make {} the GPU of a thread", name_).c_str());
  }

  Result<std::byte*> allocate(MemoryKind kind, std::uint64_t bytes) override {
    const CurrentDevice current(ordinal_);
    void* memory = nullptr;
    const bool is_device = kind == MemoryKind::kDevice;
    const cudaError_t code =
        is_device ? cudaMalloc(&memory, bytes) : cudaHostAlloc(&memory, bytes, cudaHostAllocPortable);
    const std::string what = is_device ? "memory of " + name_ : "pinned host memory";
    KVFERRY_TRY(cuda_result(code, fmt::format("cannot allocate {} bytes of {}", bytes, what).c_str()));
    return static_cast<std::byte*>(memory);
  }
  void release(MemoryKind kind, std::byte* base) override {
    const CurrentDevice current(ordinal_);
    complain(kind == MemoryKind::kDevice ? cudaFree(base) : cudaFreeHost(base), "cannot free GPU or pinned memory");
  }
  Result<std::uint64_t> free_bytes() override {
    const CurrentDevice current(ordinal_);
    std::size_t free = 0, total = 0;
    const cudaError_t code = cudaMemGetInfo(&free, &total);
    KVFERRY_TRY(cuda_result(code, fmt::format("cannot query how much memory of {} is free", name_).c_str()));
    return std::uint64_t{free};
  }
  Result<void> pin(std::span<std::byte> memory) override {
    const CurrentDevice current(ordinal_);
    const std::lock_guard lock(mutex_);
    if (const auto found = pins_.find(memory.data()); found != pins_.end() && found->second.bytes == memory.size()) {
      ++found->second.count;
      return {};
    }
    const cudaError_t code =
        cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterPortable | cudaHostRegisterMapped);
    const bool is_foreign = code == cudaErrorHostMemoryAlreadyRegistered && is_pinned_by_others(memory);
    const std::string what = fmt::format("cannot pin {} bytes of host memory", memory.size());
    if (Result<void> ok = cuda_result(code, what.c_str()); !ok && !is_foreign) return ok;
    pins_[memory.data()] = {memory.size(), 1, is_foreign};
    return {};
  }
  void unpin(std::span<std::byte> memory) override {
    const CurrentDevice current(ordinal_);
    const std::lock_guard lock(mutex_);
    const auto found = pins_.find(memory.data());
    if (found == pins_.end() || --found->second.count > 0) return;
    const bool is_foreign = found->second.is_foreign;
    pins_.erase(found);
    if (is_foreign) return;
    complain(cudaHostUnregister(memory.data()), "cannot unpin host memory");
  }

  Result<DeviceStream> make_stream() override {
    const CurrentDevice current(ordinal_);
    cudaStream_t stream = nullptr;
    KVFERRY_TRY(cuda_result(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cannot create a CUDA stream"));
    return DeviceStream{stream};
  }
  void drop_stream(DeviceStream stream) override {
    const CurrentDevice current(ordinal_);
    complain(cudaStreamDestroy(stream_of(stream)), "cannot destroy a CUDA stream");
  }

  Result<EventHandle> record(DeviceStream stream) override {
    const CurrentDevice current(ordinal_);
    Event event = KVFERRY_TRY(make_event());
    KVFERRY_TRY(cuda_result(cudaEventRecord(event.get(), stream_of(stream)), "cannot record a CUDA event"));
    return EventHandle{event.release()};
  }
  void drop_event(EventHandle event) override {
    const CurrentDevice current(ordinal_);
    complain(cudaEventDestroy(event_of(event)), "cannot destroy a CUDA event");
  }
  Result<bool> is_reached(EventHandle event) override {
    const CurrentDevice current(ordinal_);
    return is_event_reached(event_of(event), "cannot query a CUDA event");
  }
  Result<void> wait(EventHandle event) override {
    const CurrentDevice current(ordinal_);
    return cuda_result(cudaEventSynchronize(event_of(event)), "cannot wait for a CUDA event");
  }
  Result<void> wait_on(DeviceStream stream, EventHandle event) override {
    const CurrentDevice current(ordinal_);
    return cuda_result(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0),
                       "cannot order a CUDA stream after an event");
  }

  Result<void> copy(std::span<const DeviceCopy> copies, DeviceStream stream) override {
    const CurrentDevice current(ordinal_);
    KVFERRY_TRY(flush_arrivals());
    if (copies.size() == 1) return copy_large(copies.front(), stream_of(stream));
    const auto is_small = [](const DeviceCopy& copy) { return copy.bytes > 0 && copy.bytes < kCopyEngineBytes; };
    PinnedBuffer buffer;
    cuda::RangeJob* jobs = nullptr;
    std::size_t num_jobs = 0;
    std::uint64_t bytes_max = 0;
    for (const DeviceCopy& copy : copies) {
      if (!is_small(copy)) {
        KVFERRY_TRY(copy_large(copy, stream_of(stream)));
        continue;
      }
      if (jobs == nullptr) {
        buffer = KVFERRY_TRY(pinned_.take(copies.size() * sizeof(cuda::RangeJob)));
        jobs = reinterpret_cast<cuda::RangeJob*>(buffer.data());
      }
      jobs[num_jobs++] = {copy.to, copy.from, copy.bytes};
      bytes_max = std::max(bytes_max, copy.bytes);
    }
    return num_jobs == 0 ? Result<void>{} : copy_small(std::move(buffer), num_jobs, bytes_max, stream_of(stream));
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
                       "cannot flush what network cards wrote to GPU memory (GPUDirect RDMA)");
  }

  /// Returns whether the memory is page-locked, but not by this object: UCX for example page-locks memory by itself.
  /// The caller holds mutex_.
  bool is_pinned_by_others(std::span<std::byte> memory) const {
    const auto after = pins_.lower_bound(memory.data() + memory.size());
    if (after != pins_.begin() && std::prev(after)->first + std::prev(after)->second.bytes > memory.data())
      return false;
    for (const std::byte* const at : {memory.data(), memory.data() + memory.size() - 1}) {
      cudaPointerAttributes attributes{};
      if (cudaPointerGetAttributes(&attributes, at) != cudaSuccess || attributes.type != cudaMemoryTypeHost)
        return false;
    }
    return true;
  }

  static Result<void> copy_large(const DeviceCopy& copy, cudaStream_t stream) {
    if (copy.bytes == 0) return {};
    return cuda_result(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDefault, stream),
                       "cannot enqueue a copy from or to GPU memory");
  }

  /// Launches a kernel for up to kJobsMax jobs at a time. Each of its thread blocks reads one job from pinned host
  /// memory, which takes less time than a copy of all jobs to the GPU before the kernel.
  Result<void> copy_small(PinnedBuffer buffer, std::size_t num_jobs, std::uint64_t bytes_max, cudaStream_t stream) {
    const auto* const jobs = reinterpret_cast<const cuda::RangeJob*>(buffer.data());
    cudaError_t code = cudaSuccess;
    for (std::size_t first = 0; first < num_jobs && code == cudaSuccess; first += cuda::kJobsMax) {
      const std::size_t batch = std::min<std::size_t>(num_jobs - first, cuda::kJobsMax);
      code = cuda::launch_ranges(jobs + first, static_cast<std::uint32_t>(batch), bytes_max, stream);
    }
    KVFERRY_TRY(keep_until_read(std::move(buffer), stream));
    return cuda_result(code, "cannot launch the CUDA kernel that copies GPU memory");
  }

  /// Keeps the buffer until the device has read it. Returns kept buffers to the pool, the oldest first, and stops at a
  /// buffer that the device may still read.
  Result<void> keep_until_read(PinnedBuffer buffer, cudaStream_t stream) {
    Event event = KVFERRY_TRY(make_event());
    KVFERRY_TRY(cuda_result(cudaEventRecord(event.get(), stream), "cannot record a CUDA event"));
    const std::lock_guard lock(mutex_);
    unread_.emplace_back(std::move(event), std::move(buffer));
    while (!unread_.empty() && cudaEventQuery(unread_.front().first.get()) == cudaSuccess) {
      pinned_.give_back(std::move(unread_.front().second));
      unread_.pop_front();
    }
    return {};
  }

  const int ordinal_;
  const std::string name_, pci_bus_id_, uuid_;
  const bool flushes_;
  PinnedPool pinned_;
  SharedAllocations shared_;
  struct Pin {
    std::size_t bytes = 0;
    std::uint32_t count = 0;
    bool is_foreign = false;  // another library has page-locked the memory, and unlocks it
  };
  std::mutex mutex_;
  std::map<std::byte*, Pin> pins_;
  std::deque<std::pair<Event, PinnedBuffer>> unread_;  // host buffers that the device may still read, oldest first
};

}  // namespace

Result<std::shared_ptr<Device>> make_cuda_device(int ordinal) {
  const int num_devices = KVFERRY_TRY(count_gpus());
  if (ordinal < 0 || ordinal >= num_devices)
    return Error{ErrorCode::kUnavailable,
                 fmt::format("GPU {} does not exist: CUDA has {} GPUs, numbered from 0", ordinal, num_devices)};
  constexpr const char* kAsking = "cannot ask CUDA for the GPU's properties";
  cudaDeviceProp properties{};
  KVFERRY_TRY(cuda_result(cudaGetDeviceProperties(&properties, ordinal), kAsking));
  int is_supported = 0, ordering = cudaGPUDirectRDMAWritesOrderingNone, flush_options = 0;
  KVFERRY_TRY(cuda_result(cudaDeviceGetAttribute(&is_supported, cudaDevAttrGPUDirectRDMASupported, ordinal), kAsking));
  KVFERRY_TRY(cuda_result(cudaDeviceGetAttribute(&ordering, cudaDevAttrGPUDirectRDMAWritesOrdering, ordinal), kAsking));
  KVFERRY_TRY(cuda_result(cudaDeviceGetAttribute(&flush_options, cudaDevAttrGPUDirectRDMAFlushWritesOptions, ordinal),
                          kAsking));
  const bool can_flush = (flush_options & cudaFlushGPUDirectRDMAWritesOptionHost) != 0;
  const bool needs_flush = is_supported != 0 && ordering == cudaGPUDirectRDMAWritesOrderingNone;
  if (needs_flush && !can_flush)
    log().warn(
        "GPU: {} (cuda:{}) can't flush what network cards write to its memory (GPUDirect RDMA), so kernels may read "
        "old bytes; with the setting lands_in_gpu=false, kvferry lets no network card write chunks there",
        properties.name, ordinal);
  return std::shared_ptr<Device>(std::make_shared<CudaDevice>(ordinal, properties, needs_flush && can_flush));
}

Result<Gpu> open_gpu(int ordinal) {
  std::shared_ptr<Device> device = KVFERRY_TRY(make_cuda_device(ordinal));
  return Gpu{std::move(device), [ordinal](KvLayout layout, ChunkFormat format) {
               return make_cuda_packer(ordinal, std::move(layout), std::move(format));
             }};
}

}  // namespace kvferry
