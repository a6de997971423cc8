// Streams, events, copies and launches.
#include <chrono>
#include <cstring>
#include <thread>

#include "tests/gpu/host_cuda/simulated.h"

namespace kvferry {
namespace host_cuda {
namespace {

Stream* stream_of(cudaStream_t stream) { return reinterpret_cast<Stream*>(stream); }
Event& event_of(cudaEvent_t event) { return *reinterpret_cast<Event*>(event); }

void take_turn(int device) {
  if (!host_gpu(device).step()) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

void wait_until(const std::shared_ptr<std::atomic<bool>>& reached, int device) {
  while (!*reached) take_turn(device);
}

std::shared_ptr<std::atomic<bool>> mark(const Stream& stream) {
  auto reached = std::make_shared<std::atomic<bool>>(false);
  host_gpu(stream.device).enqueue(stream.inner, [reached] { return *reached = true; });
  return reached;
}

cudaError_t synchronize(const Stream& stream) {
  ++host_cuda_counts().host_waits;
  wait_until(mark(stream), stream.device);
  trim_pools(stream.device);
  return cudaSuccess;
}

}  // namespace

Stream resolve(cudaStream_t stream) { return stream == nullptr ? Stream{use_device(), nullptr} : *stream_of(stream); }

void wait_for_all(int device) {
  while (!host_gpu(device).is_idle()) take_turn(device);
  trim_pools(device);
}

void launch(cudaStream_t stream, std::function<bool()> work) {
  const int device = use_device();
  const Stream to = resolve(stream);
  if (to.device != device)
    keep(cudaErrorInvalidResourceHandle);
  else
    host_gpu(device).enqueue(to.inner, std::move(work));
}

}  // namespace host_cuda

SimDevice& host_gpu(int ordinal) {
  static SimDevice gpus[kHostGpus] = {SimDevice(7, SimDevice::Drive::kInBackground),
                                      SimDevice(8, SimDevice::Drive::kInBackground),
                                      SimDevice(9, SimDevice::Drive::kInBackground)};
  return gpus[ordinal];
}

void host_gpu_enqueue(cudaStream_t stream, std::function<bool()> work) {
  const host_cuda::Stream to = host_cuda::resolve(stream);
  host_gpu(to.device).enqueue(to.inner, std::move(work));
}

}  // namespace kvferry

using namespace kvferry;
using namespace kvferry::host_cuda;

extern "C" {

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  const int device = use_device();
  const auto made = host_gpu(device).make_stream();
  if (!made) return keep(cudaErrorUnknown);
  *stream = reinterpret_cast<cudaStream_t>(new Stream{device, *made});
  const std::lock_guard lock(state().mutex);
  ++state().num_streams[device];
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  use_device();
  const std::unique_ptr<Stream> dropped(stream_of(stream));
  host_gpu(dropped->device).drop_stream(dropped->inner);
  const std::lock_guard lock(state().mutex);
  --state().num_streams[dropped->device];
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return synchronize(resolve(stream)); }
cudaError_t cudaDeviceSynchronize() {
  const int device = use_device();
  ++host_cuda_counts().host_waits;
  wait_for_all(device);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  use_device();
  if (event_of(event).reached == nullptr) return cudaSuccess;
  host_gpu_enqueue(stream, [reached = event_of(event).reached] { return reached->load(); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  const int device = use_device();
  *event = reinterpret_cast<cudaEvent_t>(new Event{device, nullptr});
  const std::lock_guard lock(state().mutex);
  ++state().num_events[device];
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  use_device();
  const std::unique_ptr<Event> dropped(&event_of(event));
  const std::lock_guard lock(state().mutex);
  --state().num_events[dropped->device];
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  use_device();
  const Stream in = resolve(stream);
  if (in.device != event_of(event).device) return keep(cudaErrorInvalidResourceHandle);
  event_of(event).reached = mark(in);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  use_device();
  const auto& reached = event_of(event).reached;
  return reached == nullptr || *reached ? cudaSuccess : keep(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  use_device();
  ++host_cuda_counts().host_waits;
  if (event_of(event).reached != nullptr) wait_until(event_of(event).reached, event_of(event).device);
  trim_pools(event_of(event).device);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  const Stream in = resolve(stream);
  bool is_from_pageable = false, is_to_pageable = false;
  {
    const std::lock_guard lock(state().mutex);
    const auto is_pageable = [&](const void* memory) {
      return !is_on_device(number_of(memory)) && !is_pinned(number_of(memory), bytes);
    };
    is_from_pageable = is_pageable(from);
    is_to_pageable = is_pageable(to);
  }
  if (is_from_pageable) {  // CUDA reads it before the call returns
    const auto* const first = static_cast<const std::byte*>(from);
    host_gpu(in.device).enqueue(in.inner, [to, staged = std::vector<std::byte>(first, first + bytes)] {
      std::memcpy(to, staged.data(), staged.size());
      return true;
    });
  } else {
    host_gpu(in.device).enqueue(in.inner, [to, from, bytes] {
      std::memcpy(to, from, bytes);
      return true;
    });
  }
  return is_to_pageable ? synchronize(in) : cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  const std::uint64_t waits = host_cuda_counts().host_waits;
  cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return waits == host_cuda_counts().host_waits ? cudaStreamSynchronize(nullptr) : cudaSuccess;
}

}  // extern "C"
