// States what kvferry relies on in CUDA's runtime and driver. gpu_runtime_test asks CUDA itself, hostgpu_runtime_test
// the simulated CUDA (host_cuda/), so that the simulation can't differ from the truth unnoticed.
#include <cuda.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/cuda/current_device.h"
#include "tests/gpu/device_cache.h"
#include "tests/gpu/fresh_process.h"

namespace kvferry {
namespace {

constexpr std::size_t kPage = 4096, kMiB = 1 << 20;

class CudaRuntime : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << "needs a GPU: " << why;
    cudaGetDeviceCount(&num_devices_);
    cudaGetLastError();
  }
  int num_devices_ = 0;
};

/// Host memory that begins at a page.
std::unique_ptr<std::byte, decltype(&std::free)> pages(std::size_t bytes) {
  auto* const memory = static_cast<std::byte*>(std::aligned_alloc(kPage, bytes));
  std::memset(memory, 1, bytes);
  return {memory, &std::free};
}

TEST_F(CudaRuntime, QuestionsMakeNoContextAndTheFirstWorkDoes) {
  in_fresh_process([] {
    int device = -1, value = 0;
    cudaDeviceProp properties{};
    EXPECT_FALSE(has_context(0));
    EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
    EXPECT_EQ(device, 0);
    EXPECT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
    EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrMemoryPoolsSupported, 0), cudaSuccess);
    EXPECT_EQ(value, 1);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    EXPECT_FALSE(has_context(0)) << "a question has made it";
    std::thread([] {
      void* memory = nullptr;
      EXPECT_EQ(cudaMalloc(&memory, 10), cudaSuccess);
      EXPECT_EQ(cudaFree(memory), cudaSuccess);
    }).join();
    EXPECT_TRUE(has_context(0)) << "it is one for the whole process";
  });
}

TEST_F(CudaRuntime, SettingADeviceMakesItsContext) {
  in_fresh_process([] {
    int count = 0;
    EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
    for (int device = count - 1; device >= 0; --device) {
      EXPECT_FALSE(has_context(device));
      EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
      EXPECT_TRUE(has_context(device));
    }
    EXPECT_EQ(cudaSetDevice(count), cudaErrorInvalidDevice);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
  });
}

TEST_F(CudaRuntime, EachThreadHasItsOwnCurrentDevice) {
  in_fresh_process([] {
    int count = 0, device = -1;
    EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
    EXPECT_EQ(cudaSetDevice(count - 1), cudaSuccess);
    std::thread([] {
      int inner = -1;
      EXPECT_EQ(cudaGetDevice(&inner), cudaSuccess);
      EXPECT_EQ(inner, 0) << "each thread begins with GPU 0";
    }).join();
    EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
    EXPECT_EQ(device, count - 1);
  });
}

TEST_F(CudaRuntime, AFailedCallsErrorStaysUntilItIsRead) {
  void *big = nullptr, *memory = nullptr;
  ASSERT_EQ(cudaMalloc(&big, std::size_t{1} << 50), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaMalloc(&memory, 100), cudaSuccess) << "a later call is not concerned";
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorMemoryAllocation);
  std::thread([] { EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "another thread's error"; }).join();
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(CudaRuntime, AnEventThatIsNotReachedIsNoError) {
  constexpr std::size_t kCopied = 64 * kMiB;
  void* memory = nullptr;
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 2 * kCopied), cudaSuccess);
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess) << "nothing was recorded";
  for (int i = 0; i < 20; ++i)
    ASSERT_EQ(cudaMemcpyAsync(memory, static_cast<std::byte*>(memory) + kCopied, kCopied, cudaMemcpyDefault, stream),
              cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event, stream), cudaSuccess);
  const cudaError_t asked = cudaEventQuery(event);
  EXPECT_TRUE(asked == cudaErrorNotReady || asked == cudaSuccess) << asked;
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
}

TEST_F(CudaRuntime, AnEventIsRecordedInStreamsOfItsDeviceOnly) {
  if (num_devices_ < 2) GTEST_SKIP() << "needs two GPUs";
  in_fresh_process([] {
    cudaStream_t stream = nullptr;
    cudaEvent_t event = nullptr;
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_EQ(cudaSetDevice(1), cudaSuccess);
    EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
    EXPECT_EQ(cudaEventRecord(event, stream), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaEventRecord(event, nullptr), cudaSuccess);
    EXPECT_EQ(cudaStreamWaitEvent(stream, event, 0), cudaSuccess) << "a stream waits for events of any device";
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  });
}

TEST_F(CudaRuntime, HostMemoryIsRegisteredOnce) {
  const auto memory = pages(2 * kMiB);
  std::byte* const base = memory.get();
  unsigned flags = 0;
  ASSERT_EQ(cudaHostRegister(base, kMiB, cudaHostRegisterPortable), cudaSuccess);
  EXPECT_EQ(cudaHostRegister(base, kMiB, cudaHostRegisterPortable), cudaErrorHostMemoryAlreadyRegistered);
  EXPECT_EQ(cudaHostRegister(base + kPage, kPage, 0), cudaErrorHostMemoryAlreadyRegistered);
  EXPECT_EQ(cudaHostRegister(base + kMiB / 2, kMiB, 0), cudaErrorHostMemoryAlreadyRegistered);
  EXPECT_EQ(cudaGetLastError(), cudaErrorHostMemoryAlreadyRegistered);
  EXPECT_EQ(cudaHostGetFlags(&flags, base), cudaSuccess);
  EXPECT_EQ(flags, unsigned{cudaHostRegisterPortable | cudaHostRegisterMapped});

  cudaPointerAttributes attributes{};
  for (const std::size_t at : {std::size_t{0}, kPage, kMiB - 1}) {
    EXPECT_EQ(cudaPointerGetAttributes(&attributes, base + at), cudaSuccess);
    EXPECT_EQ(attributes.type, cudaMemoryTypeHost) << at;
  }
  EXPECT_EQ(cudaPointerGetAttributes(&attributes, base + kMiB), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);

  EXPECT_EQ(cudaHostUnregister(base + kPage), cudaErrorInvalidValue) << "not the beginning";
  EXPECT_EQ(cudaHostUnregister(base), cudaSuccess);
  EXPECT_EQ(cudaHostUnregister(base), cudaErrorHostMemoryNotRegistered);
  EXPECT_EQ(cudaGetLastError(), cudaErrorHostMemoryNotRegistered);
  EXPECT_EQ(cudaHostRegister(base, 2 * kMiB, cudaHostRegisterPortable), cudaSuccess);
  EXPECT_EQ(cudaHostUnregister(base), cudaSuccess);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(CudaRuntime, PageableMemoryIsReadBeforeTheCallReturnsAndWrittenToo) {
  std::vector<std::byte> up(kPage, std::byte{7}), down(kPage);
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, kPage), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(memory, up.data(), kPage, cudaMemcpyDefault, nullptr), cudaSuccess);
  std::ranges::fill(up, std::byte{8});
  ASSERT_EQ(cudaMemcpyAsync(down.data(), memory, kPage, cudaMemcpyDefault, nullptr), cudaSuccess);
  EXPECT_EQ(down, std::vector<std::byte>(kPage, std::byte{7}));
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
}

TEST_F(CudaRuntime, PeersAreEnabledOnceForEachPair) {
  if (num_devices_ < 2) GTEST_SKIP() << "needs two GPUs";
  int can_access = -1;
  ASSERT_EQ(cudaDeviceCanAccessPeer(&can_access, 0, 0), cudaSuccess);
  EXPECT_EQ(can_access, 0);
  ASSERT_EQ(cudaDeviceCanAccessPeer(&can_access, 0, 1), cudaSuccess);
  if (can_access == 0) GTEST_SKIP() << "the GPUs can't access each other";
  in_fresh_process([] {
    EXPECT_EQ(cudaDeviceEnablePeerAccess(1, 0), cudaSuccess);
    EXPECT_EQ(cudaDeviceEnablePeerAccess(1, 0), cudaErrorPeerAccessAlreadyEnabled);
    EXPECT_EQ(cudaDeviceDisablePeerAccess(1), cudaSuccess);
    EXPECT_EQ(cudaDeviceDisablePeerAccess(1), cudaErrorPeerAccessNotEnabled);
    EXPECT_EQ(cudaGetLastError(), cudaErrorPeerAccessNotEnabled);
  });
}

}  // namespace
}  // namespace kvferry
